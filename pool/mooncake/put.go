package mooncake

import (
	"context"
	"errors"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// Put implements pool.Store. Busy is an item that Mooncake had no room for or did not take, or that
// is too large for the bounce memory.
func (s *Store) Put(ctx context.Context, items []pool.Item) error {
	return s.batch(ctx, items, func(h *helper, items []pool.Item, share int) (int, error) {
		return s.putSome(ctx, h, items, share)
	})
}

func (s *Store) putSome(ctx context.Context, h *helper, items []pool.Item, share int) (int, error) {
	free := func() { s.values <- share }
	p := s.pack(items, share, pool.Busy)
	if len(p.items) == 0 {
		free()
		return p.taken, nil
	}
	for i, it := range p.items {
		at := &p.places[i]
		pool.AppendValueHeader(s.header(at)[:0], &it.Key, it.Data)
		copy(s.copied(at), it.Data)
	}
	codes, err := s.call(ctx, h, len(p.items), p.arena, &request{
		frame: func(id uint64) any { return &transferRequest{id, opPut, p.places} },
		free:  free,
		tally: func(codes []int64) { s.tallyPut(h, p.places, codes) },
	})
	if err != nil {
		return 0, err
	}
	free()
	for i, code := range codes {
		s.settlePut(h, p.items[i], code)
	}
	return p.taken, nil
}

// tallyPut counts the stored values, which have code 0.
func (s *Store) tallyPut(h *helper, places []place, codes []int64) {
	s.tallyTransfers(h, opPut, codes)
	for i, code := range codes {
		if code == 0 && i < len(places) {
			s.stock.Add(1, pool.ValueHeader+places[i].Length)
		}
	}
}

func (s *Store) settlePut(h *helper, it *pool.Item, code int64) {
	switch code {
	case 0:
		it.Status = pool.OK
		s.setStateFrom(h, remote.OK, nil)
	case 1, codeExists:
		it.Status = pool.Exists
	case codeNoRoom, codeQuota:
		s.count[countFull].Add(1)
		s.setStateFrom(h, remote.Full, errFull)
	default:
		s.count[countFailed].Add(1)
	}
}

var errFull = errors.New("mooncake: no segment has room")

// Get implements pool.Store. An item that Mooncake did not return is Missing.
func (s *Store) Get(ctx context.Context, items []pool.Item) error {
	return s.batch(ctx, items, func(h *helper, items []pool.Item, share int) (int, error) {
		return s.getSome(ctx, h, items, share)
	})
}

func (s *Store) getSome(ctx context.Context, h *helper, items []pool.Item, share int) (int, error) {
	free := func() { s.values <- share }
	p := s.pack(items, share, pool.Missing)
	if len(p.items) == 0 {
		free()
		return p.taken, nil
	}
	codes, err := s.call(ctx, h, len(p.items), p.arena, &request{
		frame: func(id uint64) any { return &transferRequest{id, opGet, p.places} },
		free:  free,
		tally: func(codes []int64) { s.tallyTransfers(h, opGet, codes) },
	})
	if err != nil {
		return 0, err
	}
	var bad []pool.Key
	for i, it := range p.items {
		if s.settleGet(it, &p.places[i], codes[i]); it.Status == pool.Corrupt {
			bad = append(bad, it.Key)
		}
	}
	free()
	if len(bad) > 0 {
		s.count[countCorrupt].Add(uint64(len(bad)))
		_ = s.Delete(ctx, bad) // so that they can be stored again; a failure does not change the status
	}
	return p.taken, nil
}

// settleGet sets an item's status. A value that does not verify, or has another length than asked
// for, is Corrupt.
func (s *Store) settleGet(it *pool.Item, at *place, code int64) {
	switch {
	case code == pool.ValueHeader+at.Length:
		copy(it.Data, s.copied(at))
		if it.Status = pool.OK; pool.CheckValue(s.header(at), &it.Key, it.Data) != nil {
			it.Status = pool.Corrupt
		}
	case code >= 0 || code == codeWrongLength:
		it.Status = pool.Corrupt
	case code != codeNotFound && code != codeGone && code != codeNotReady:
		s.count[countFailed].Add(1)
	}
}

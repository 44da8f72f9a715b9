package mooncake

import (
	"context"
	"errors"

	"github.com/kvagent/kvagent/pool"
)

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
		encode: func(id uint64) []byte { return encodeValues(id, opGet, p.places) },
		free:   free,
		tally:  func(codes []int64) { s.tallyTransfers(h, opGet, codes) },
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
	case code == pool.ValueHeader+at.length:
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

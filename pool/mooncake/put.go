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
	return s.transfer(ctx, opPut, items, pool.Busy, s.settlePut)
}

func (s *Store) settlePut(h *helper, it *pool.Item, _ *place, code int64) {
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
	var bad []pool.Key
	err := s.transfer(ctx, opGet, items, pool.Missing, func(_ *helper, it *pool.Item, at *place, code int64) {
		if s.settleGet(it, at, code); it.Status == pool.Corrupt {
			bad = append(bad, it.Key)
		}
	})
	if len(bad) > 0 {
		s.count[countCorrupt].Add(uint64(len(bad)))
		_ = s.Delete(ctx, bad) // so that they can be stored again; a failure does not change the status
	}
	return err
}

// settleGet sets an item's status: Corrupt if it does not verify or has another length.
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

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

// Get implements pool.Store. Missing is an item that Mooncake does not have, Corrupt one of another
// length, Busy one that it did not return.
func (s *Store) Get(ctx context.Context, items []pool.Item) error {
	return s.transfer(ctx, opGet, items, pool.Busy, s.settleGet)
}

func (s *Store) settleGet(_ *helper, it *pool.Item, at *place, code int64) {
	switch {
	case code == at.Length:
		copy(it.Data, s.copied(at))
		it.Status = pool.OK
	case code >= 0 || code == codeWrongLength:
		it.Status = pool.Corrupt
	case code == codeNotFound || code == codeGone || code == codeNotReady:
		it.Status = pool.Missing
	default:
		s.count[countFailed].Add(1)
	}
}

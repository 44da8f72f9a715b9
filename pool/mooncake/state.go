package mooncake

import (
	"sync/atomic"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

type counts struct {
	starts, deaths, kills, replaced, errors, full, corrupt, failed, large, inPlace, copied, late atomic.Uint64
}

// Counters of a store since it was opened.
type Counters struct {
	Starts   uint64 // helpers started
	Deaths   uint64 // connected helpers that ended, for any reason
	Kills    uint64 // helpers killed because they hung
	Replaced uint64 // helpers ended because all their transfers failed; not in Deaths
	Late     uint64 // requests whose caller left while the helper worked in the arena
	Errors   uint64 // requests that Mooncake did not answer
	Full     uint64 // blocks refused because there was no room
	Corrupt  uint64 // blocks that did not verify and were deleted
	Failed   uint64 // blocks that Mooncake refused for another reason
	Large    uint64 // blocks outside the arena too large for the bounce memory
	InPlace  uint64 // bytes put and got in the arena
	Copied   uint64 // bytes put and got through the bounce memory
}

// Counters returns the counters. It may be called from any goroutine.
func (s *Store) Counters() Counters {
	c := &s.count
	return Counters{
		Starts:   c.starts.Load(),
		Deaths:   c.deaths.Load(),
		Kills:    c.kills.Load(),
		Replaced: c.replaced.Load(),
		Late:     c.late.Load(),
		Errors:   c.errors.Load(),
		Full:     c.full.Load(),
		Corrupt:  c.corrupt.Load(),
		Failed:   c.failed.Load(),
		Large:    c.large.Load(),
		InPlace:  c.inPlace.Load(),
		Copied:   c.copied.Load(),
	}
}

var _ pool.Reporter = (*Store)(nil)

// Report implements pool.Reporter.
func (s *Store) Report() pool.StoreReport {
	c := s.Counters()
	return s.condition.Report(
		pool.Count{Name: "helper_starts", N: c.Starts},
		pool.Count{Name: "helper_deaths", N: c.Deaths},
		pool.Count{Name: "helper_kills", N: c.Kills},
		pool.Count{Name: "helpers_replaced", N: c.Replaced},
		pool.Count{Name: "late", N: c.Late},
		pool.Count{Name: "unanswered", N: c.Errors},
		pool.Count{Name: "full", N: c.Full},
		pool.Count{Name: "corrupt", N: c.Corrupt},
		pool.Count{Name: "refused", N: c.Failed},
		pool.Count{Name: "too_large", N: c.Large},
		pool.Count{Name: "bytes_in_place", N: c.InPlace},
		pool.Count{Name: "bytes_copied", N: c.Copied},
	)
}

// State returns the current state.
func (s *Store) State() remote.State { return s.condition.State() }

// setStateFrom sets the state because of a helper's answer, unless the helper was replaced.
func (s *Store) setStateFrom(h *helper, to remote.State, reason error) {
	s.condition.SetIf(func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.helper == h
	}, to, reason)
}

// answered notes that the master answered. Only a put shows that there is room again.
func (s *Store) answered(h *helper) {
	if s.State() == remote.Lost {
		s.setStateFrom(h, remote.OK, nil)
	}
}

// Usage returns what this store put since it was opened, less what it deleted. Mooncake does not
// report evictions.
func (s *Store) Usage() pool.Usage { return s.stock.Usage() }

// Error codes of Mooncake with a specific meaning.
const (
	codeNoRoom      = -200
	codeWrongLength = -600
	codeNotReady    = -703
	codeNotFound    = -704
	codeExists      = -705
	codeGone        = -712
	codeQuota       = -1700
)

// silent reports whether a code means that a master or a node did not answer.
func silent(code int64) bool { return code == codeTransfer || code <= -900 && code > -1000 }

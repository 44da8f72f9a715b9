package mooncake

import (
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// Counts of a store since it was opened.
const (
	countStarts   = iota // helpers started
	countDeaths          // connected helpers that ended, for any reason
	countKills           // helpers killed because they hung
	countReplaced        // helpers ended because all their transfers failed; not in countDeaths
	countLate            // requests whose caller left while the helper worked in the arena
	countErrors          // requests that Mooncake did not answer
	countFull            // blocks refused because there was no room
	countCorrupt         // blocks that did not verify and were deleted
	countFailed          // blocks that Mooncake refused for another reason
	countLarge           // blocks outside the arena too large for the bounce memory
	countInPlace         // bytes put and got in the arena
	countCopied          // bytes put and got through the bounce memory
	counts
)

// countNames are their names in reports.
var countNames = [counts]string{
	countStarts: "helper_starts", countDeaths: "helper_deaths", countKills: "helper_kills",
	countReplaced: "helpers_replaced", countLate: "late", countErrors: "unanswered", countFull: "full",
	countCorrupt: "corrupt", countFailed: "refused", countLarge: "too_large", countInPlace: "bytes_in_place",
	countCopied: "bytes_copied",
}

var _ pool.Reporter = (*Store)(nil)

// Report implements pool.Reporter.
func (s *Store) Report() pool.StoreReport { return s.condition.Report(countNames[:], s.count[:]) }

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

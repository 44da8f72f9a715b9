package redis

import (
	"slices"
	"strings"

	"github.com/redis/rueidis"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// Counts of a store since it was opened.
const (
	countDials  = iota // first connections that failed
	countErrors        // pipelines without an answer
	countFull          // blocks refused because of maxmemory
	countFailed        // commands that the server refused for another reason
	counts
)

// countNames are their names in reports.
var countNames = [counts]string{
	countDials: "dials_failed", countErrors: "unanswered", countFull: "full", countFailed: "refused",
}

var _ pool.Reporter = (*Store)(nil)

// Report implements pool.Reporter.
func (s *Store) Report() pool.StoreReport { return s.condition.Report(countNames[:], s.count[:]) }

// State returns the current state.
func (s *Store) State() remote.State { return s.condition.State() }

// stateAfter returns the state that an answer implies. Only a put shows that there is room again.
func (s *Store) stateAfter(err error) remote.State {
	switch {
	case isDenied(err):
		return remote.Denied
	case s.State() == remote.Full || isFull(err):
		return remote.Full
	}
	return remote.OK
}

// isDenied reports whether a server refused a client's credentials.
func isDenied(err error) bool { return isError(err, "NOAUTH", "WRONGPASS", "NOPERM") }

// isFull reports whether a server refused to store because of maxmemory.
func isFull(err error) bool { return isError(err, "OOM") }

// isError reports whether a server answered with an error of one of the kinds.
func isError(err error, kinds ...string) bool {
	e, ok := rueidis.IsRedisErr(err)
	if !ok {
		return false
	}
	kind, _, _ := strings.Cut(e.Error(), " ")
	return slices.Contains(kinds, kind)
}

// Usage returns nothing: the server has its own figures, of all who use it.
func (s *Store) Usage() pool.Usage { return pool.Usage{} }

package redis

import (
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
func isDenied(err error) bool {
	e, ok := rueidis.IsRedisErr(err)
	if !ok {
		return false
	}
	kind, _, _ := strings.Cut(e.Error(), " ")
	return kind == "NOAUTH" || kind == "WRONGPASS" || kind == "NOPERM"
}

// isFull reports whether a server refused to store because of maxmemory.
func isFull(err error) bool {
	e, ok := rueidis.IsRedisErr(err)
	return ok && strings.HasPrefix(e.Error(), "OOM")
}

// Usage returns nothing: the server has its own figures, of all who use it.
func (s *Store) Usage() pool.Usage { return pool.Usage{} }

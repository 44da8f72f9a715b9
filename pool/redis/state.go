package redis

import (
	"context"
	"strconv"
	"strings"

	"github.com/redis/rueidis"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// Counts of a store since it was opened.
const (
	countDials   = iota // first connections that failed
	countErrors         // pipelines without an answer
	countFull           // blocks refused because of maxmemory
	countCorrupt        // blocks that did not verify and were deleted
	countFailed         // commands that the server refused for another reason
	counts
)

// countNames are their names in reports.
var countNames = [counts]string{
	countDials: "dials_failed", countErrors: "unanswered", countFull: "full", countCorrupt: "corrupt",
	countFailed: "refused",
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

// Usage returns the memory and keys of all servers, whoever uses them, as of at most usageEvery
// ago, or of their last answer.
func (s *Store) Usage() pool.Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.usage
}

// refresh asks all servers for their memory and number of keys.
func (s *Store) refresh(ctx context.Context, client rueidis.Client) {
	ctx, cancel := context.WithTimeout(ctx, s.o.Silence)
	defer cancel()
	var u pool.Usage
	for _, node := range client.Nodes() {
		info, err := node.Do(ctx, node.B().Arbitrary("INFO").Build()).ToString()
		if err != nil {
			if !answered(err) {
				s.condition.Set(remote.Lost, err)
			}
			return
		}
		if fields := infoFields(info); fields["role"] == "master" {
			u.Bytes += number(fields["used_memory"])
			u.Capacity += number(fields["maxmemory"])
			u.Items += keysOf(fields)
		}
	}
	s.mu.Lock()
	s.usage = u
	s.mu.Unlock()
	if s.State() == remote.Lost {
		s.condition.Set(remote.OK, nil)
	}
}

func infoFields(info string) map[string]string {
	fields := map[string]string{}
	for line := range strings.Lines(info) {
		if name, value, ok := strings.Cut(strings.TrimRight(line, "\r\n"), ":"); ok {
			fields[name] = value
		}
	}
	return fields
}

// keysOf sums the keys of all databases: "db0:keys=12,expires=0,...".
func keysOf(fields map[string]string) (n int64) {
	for name, value := range fields {
		if _, ok := strings.CutPrefix(name, "db"); ok {
			if keys, ok := strings.CutPrefix(value, "keys="); ok {
				text, _, _ := strings.Cut(keys, ",")
				n += number(text)
			}
		}
	}
	return n
}

// number parses a number; other text is 0.
func number(text string) int64 {
	n, _ := strconv.ParseInt(text, 10, 64)
	return n
}

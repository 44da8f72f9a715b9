package evictsim

import (
	"cmp"
	"math/rand/v2"
	"slices"

	"github.com/kvagent/kvagent/pool"
)

// Told is what a policy is told of a request at a time: facts of its end, or a wish.
type Told struct {
	Millis  int64
	Request int
	Finish  pool.Finish
	Output  uint32
	// Priority until Until, ms; as in pool.Advice.
	Priority uint8
	Until    int64
}

// tokenMillis is how long a request takes for each token that it generates: traces do not tell.
const tokenMillis = 10

// end returns when a request ends.
func (r *Request) end() int64 { return r.Millis + int64(r.Output)*tokenMillis }

// WithFacts returns a stream in which policies are told how each request ended, as far as the trace
// tells.
func (s *Stream) WithFacts() *Stream {
	told := *s
	for i := range s.Requests {
		if r := &s.Requests[i]; r.Output > 0 || r.Finish != pool.FinishUnknown {
			told.Told = append(told.Told, Told{Millis: r.end(), Request: i, Finish: r.Finish, Output: r.Output})
		}
	}
	return told.inOrder()
}

// soon is the time in ms within which a session has to come back to be worth a hint.
const soon = 10 * minute

// WithHints returns a stream in which policies are told the facts, and whether a request's session
// comes back soon, and when. recall is the share of the requests for which a hint is given,
// precision that of the hints that are true. The false ones say the opposite of what happens; 1 and
// 1 is an oracle, 0 and 1 one that always lies.
func (s *Stream) WithHints(precision, recall float64, seed uint64) *Stream {
	random := rand.New(rand.NewPCG(seed, 11))
	told := *s
	next := nextUses(s)
	times := s.returns(next)
	for i := range s.Requests {
		r := &s.Requests[i]
		t := Told{Millis: r.end(), Request: i, Output: r.Output, Finish: r.Finish}
		if len(r.Blocks) == 0 || random.Float64() >= recall {
			told.Told = append(told.Told, t) // the facts alone
			continue
		}
		again, back := times[i]-r.end(), times[i] >= 0 && times[i]-r.end() <= soon
		if random.Float64() >= precision {
			back = !back
			again = int64(random.Float64() * minute)
		}
		if t.Until = r.end() + soon; back {
			t.Priority, t.Until = 100, r.end()+max(1, again)
		}
		told.Told = append(told.Told, t)
	}
	return told.inOrder()
}

// returns returns when the block in the middle of each request is used next; -1 if it is not.
func (s *Stream) returns(next [][]uint32) []int64 {
	times := make([]int64, len(s.Requests))
	for i := range times {
		times[i] = -1
		if n := len(next[i]); n > 0 && int(next[i][n/2]) < len(s.Requests) {
			times[i] = s.Requests[next[i][n/2]].Millis
		}
	}
	return times
}

func (s *Stream) inOrder() *Stream {
	slices.SortStableFunc(s.Told, func(a, b Told) int { return cmp.Compare(a.Millis, b.Millis) })
	return s
}

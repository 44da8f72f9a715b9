package s3

import (
	"context"
	"net/http"
	"sync/atomic"

	"github.com/minio/minio-go/v7"

	"github.com/kvagent/kvagent/pool"
)

// State of the store.
type State uint8

// The states.
const (
	StateOK     State = iota
	StateLost         // nobody answers
	StateDenied       // the service refuses: keys, policy, or no such bucket
	StateSlow         // the service asks for fewer requests, or has an error of its own
)

func (s State) String() string { return [...]string{"ok", "lost", "denied", "slow"}[s] }

type counts struct{ errors, corrupt, denied, slow, failed atomic.Uint64 }

// Counters of a store, since it was opened.
type Counters struct {
	Errors  uint64 // requests that nobody answered
	Corrupt uint64 // objects that did not verify, and were deleted
	Denied  uint64 // requests refused for lack of permission, or of the bucket
	Slow    uint64 // requests refused because there are too many, or with an error of the service's own
	Failed  uint64 // requests refused for another reason
	Plain   bool   // the service cannot be told to write only what is not there
}

// Counters may be called from any goroutine.
func (s *Store) Counters() Counters {
	c := &s.count
	return Counters{
		Errors: c.errors.Load(), Corrupt: c.corrupt.Load(), Denied: c.denied.Load(), Slow: c.slow.Load(), Failed: c.failed.Load(),
		Plain: s.plain.Load(),
	}
}

// State is the state now.
func (s *Store) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

func (s *Store) turn(to State, reason error) {
	s.mu.Lock()
	from := s.state
	s.state = to
	s.mu.Unlock()
	if from != to && s.o.OnState != nil {
		s.o.OnState(from, to, reason)
	}
}

// Usage is what this process stored since it was opened: a bucket does not say what it holds.
func (s *Store) Usage() pool.Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return pool.Usage{Items: s.stock.items, Bytes: s.stock.bytes}
}

func (s *Store) keep(items, bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stock.items = max(s.stock.items+items, 0) // others delete and store too
	s.stock.bytes = max(s.stock.bytes+bytes, 0)
}

// verdict is what an answer means for one request.
type verdict uint8

const (
	done    verdict = iota
	missing         // no such object
	exists          // it was not written, because it is there
	unknown         // the service does not know If-None-Match
	refused         // the service answered, and did not do it
	silence         // nobody answered
)

// judge decides what an error means, counts it, and turns the state.
func (s *Store) judge(ctx context.Context, err error) verdict {
	if err == nil {
		s.turn(StateOK, nil)
		return done
	}
	if ctx.Err() != nil {
		return silence
	}
	r := minio.ToErrorResponse(err)
	switch {
	case r.StatusCode == 0:
		s.count.errors.Add(1)
		s.turn(StateLost, err)
		return silence
	case r.Code == "NoSuchBucket" || r.StatusCode == http.StatusForbidden || r.StatusCode == http.StatusUnauthorized:
		s.count.denied.Add(1)
		s.turn(StateDenied, err)
		return refused
	case r.StatusCode == http.StatusNotFound:
		s.turn(StateOK, nil)
		return missing
	case r.StatusCode == http.StatusPreconditionFailed:
		s.turn(StateOK, nil)
		return exists
	case r.StatusCode == http.StatusNotImplemented:
		return unknown
	case r.StatusCode == http.StatusTooManyRequests || r.StatusCode >= 500:
		s.count.slow.Add(1)
		s.turn(StateSlow, err)
	default:
		s.count.failed.Add(1)
	}
	return refused
}

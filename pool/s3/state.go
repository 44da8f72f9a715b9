package s3

import (
	"context"
	"errors"
	"net/http"
	"sync/atomic"

	"github.com/minio/minio-go/v7"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

type counts struct{ errors, corrupt, denied, hidden, slow, failed atomic.Uint64 }

// Counters of a store, since it was opened.
type Counters struct {
	Errors  uint64 // requests that nobody answered
	Corrupt uint64 // objects that did not verify, and were deleted
	Denied  uint64 // requests refused for lack of permission, or of the bucket
	Hidden  uint64 // requests refused that were taken for a miss: the keys may not list the bucket
	Slow    uint64 // requests refused because there are too many, or with an error of the service's own
	Failed  uint64 // requests refused for another reason
	Plain   bool   // the service cannot be told to write only what is not there
}

// Counters may be called from any goroutine.
func (s *Store) Counters() Counters {
	c := &s.count
	return Counters{
		Errors: c.errors.Load(), Corrupt: c.corrupt.Load(), Denied: c.denied.Load(), Hidden: c.hidden.Load(), Slow: c.slow.Load(), Failed: c.failed.Load(),
		Plain: s.plain.Load(),
	}
}

var _ pool.Reporter = (*Store)(nil)

// Report implements pool.Reporter.
func (s *Store) Report() pool.StoreReport {
	c := s.Counters()
	return s.condition.Report(
		pool.Count{Name: "unanswered", N: c.Errors}, pool.Count{Name: "corrupt", N: c.Corrupt}, pool.Count{Name: "denied", N: c.Denied},
		pool.Count{Name: "hidden", N: c.Hidden},
		pool.Count{Name: "slow", N: c.Slow}, pool.Count{Name: "refused", N: c.Failed},
	)
}

// State is the state now.
func (s *Store) State() remote.State { return s.condition.State() }

// Usage is what this process stored since it was opened: a bucket does not say what it holds.
func (s *Store) Usage() pool.Usage { return s.stock.Usage() }

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

// errHidden is what OnState is told once, with the state as it is, of keys that may not list the bucket.
var errHidden = errors.New("403 for what is not there is taken for a miss: the keys have no right to list the bucket, or to read this")

// judgeRead is judge for HEAD and GET. To keys that may not list the bucket S3 does not say that an object is not there, but 403 AccessDenied, as to keys
// that may do nothing. If something else was done with these keys, and nothing but reads refused since, it is the former.
func (s *Store) judgeRead(ctx context.Context, err error) verdict {
	r := minio.ToErrorResponse(err)
	if r.StatusCode != http.StatusForbidden || r.Code != minio.AccessDenied || !s.allowed.Load() {
		return s.judge(ctx, err)
	}
	s.count.hidden.Add(1)
	if state := s.State(); s.o.OnState != nil && !s.saidHidden.Swap(true) {
		s.o.OnState(state, state, errHidden)
	}
	return missing
}

// judge decides what an error means, counts it, and turns the state.
func (s *Store) judge(ctx context.Context, err error) verdict {
	if err == nil {
		s.allowed.Store(true)
		s.condition.Turn(remote.OK, nil)
		return done
	}
	if ctx.Err() != nil {
		return silence
	}
	r := minio.ToErrorResponse(err)
	switch {
	case r.StatusCode == 0:
		s.count.errors.Add(1)
		s.condition.Turn(remote.Lost, err)
		return silence
	case r.Code == "NoSuchBucket" || r.StatusCode == http.StatusForbidden || r.StatusCode == http.StatusUnauthorized:
		s.allowed.Store(false)
		s.count.denied.Add(1)
		s.condition.Turn(remote.Denied, err)
		return refused
	case r.StatusCode == http.StatusNotFound:
		if s.State() != remote.Denied { // the answer to HEAD has no room to say that it is the bucket that is missing
			s.condition.Turn(remote.OK, nil)
		}
		return missing
	case r.StatusCode == http.StatusPreconditionFailed:
		s.condition.Turn(remote.OK, nil)
		return exists
	case r.StatusCode == http.StatusNotImplemented:
		return unknown
	case r.StatusCode == http.StatusTooManyRequests || r.StatusCode >= 500:
		s.count.slow.Add(1)
		s.condition.Turn(remote.Slow, err)
	default:
		s.count.failed.Add(1)
	}
	return refused
}

package s3

import (
	"context"
	"errors"
	"net/http"

	"github.com/minio/minio-go/v7"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// Counts of a store since it was opened.
const (
	countErrors  = iota // requests without an answer
	countCorrupt        // objects that did not verify and were deleted
	countDenied         // requests refused for lack of permission, or of the bucket
	countHidden         // refused requests taken for a miss: the keys may not list the bucket
	countSlow           // requests refused because there are too many, or with an internal error of the service
	countFailed         // requests refused for another reason
	counts
)

// countNames are their names in reports.
var countNames = [counts]string{
	countErrors: "unanswered", countCorrupt: "corrupt", countDenied: "denied", countHidden: "hidden",
	countSlow: "slow", countFailed: "refused",
}

var _ pool.Reporter = (*Store)(nil)

// Report implements pool.Reporter.
func (s *Store) Report() pool.StoreReport { return s.condition.Report(countNames[:], s.count[:]) }

// State returns the current state.
func (s *Store) State() remote.State { return s.condition.State() }

// Usage returns what this process stored since it was opened. A bucket does not report its
// contents.
func (s *Store) Usage() pool.Usage { return s.stock.Usage() }

// verdict is the meaning of an answer for one request.
type verdict uint8

const (
	done    verdict = iota
	missing         // no such object
	exists          // not written, because it exists
	unknown         // the service does not support If-None-Match
	refused         // the service answered and did not do it
	silence         // there was no answer
)

// errHidden is passed to OnState once, with an unchanged state, if the keys may not list the
// bucket.
var errHidden = errors.New("403 for a missing object is taken for a miss: " +
	"the keys may not list the bucket, or may not read this object")

// judgeRead is judge for HEAD and GET. If the keys may not list the bucket, S3 answers 403
// AccessDenied for a missing object, as it does to keys without any right. judgeRead takes it for a
// miss if the keys are known to be valid.
func (s *Store) judgeRead(ctx context.Context, err error) verdict {
	r := minio.ToErrorResponse(err)
	if r.StatusCode != http.StatusForbidden || r.Code != minio.AccessDenied || !s.allowed.Load() {
		return s.judge(ctx, err)
	}
	s.count[countHidden].Add(1)
	if state := s.State(); s.o.OnState != nil && !s.hiddenLogged.Swap(true) {
		s.o.OnState(state, state, errHidden)
	}
	return missing
}

// judge decides what an error means, counts it, and sets the state.
func (s *Store) judge(ctx context.Context, err error) verdict {
	if err == nil {
		s.allowed.Store(true)
		s.condition.Set(remote.OK, nil)
		return done
	}
	if ctx.Err() != nil {
		return silence
	}
	r := minio.ToErrorResponse(err)
	switch {
	case r.StatusCode == 0:
		s.count[countErrors].Add(1)
		s.condition.Set(remote.Lost, err)
		return silence
	case r.Code == "NoSuchBucket" || r.StatusCode == http.StatusForbidden || r.StatusCode == http.StatusUnauthorized:
		s.allowed.Store(false)
		s.count[countDenied].Add(1)
		s.condition.Set(remote.Denied, err)
		return refused
	case r.StatusCode == http.StatusNotFound:
		// The answer to HEAD cannot say that the bucket is missing.
		if s.State() != remote.Denied {
			s.condition.Set(remote.OK, nil)
		}
		return missing
	case r.StatusCode == http.StatusPreconditionFailed:
		s.condition.Set(remote.OK, nil)
		return exists
	case r.StatusCode == http.StatusNotImplemented:
		return unknown
	case r.StatusCode == http.StatusTooManyRequests || r.StatusCode >= 500:
		s.count[countSlow].Add(1)
		s.condition.Set(remote.Slow, err)
	default:
		s.count[countFailed].Add(1)
	}
	return refused
}

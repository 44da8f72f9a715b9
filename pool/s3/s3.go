// Package s3 keeps blocks in an S3 bucket, which many agents may share. Each shard of a block is
// one object named {prefix}blocks/{key}, where {key} is pool.Key.Text. Markers of resets are named
// {prefix}resets/{key}, so that a lifecycle rule can let blocks alone expire. An object is written
// only if it does not exist (If-None-Match), so the first writer wins, and it is visible as a whole
// or not at all.
package s3

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// Store implements pool.Store. All methods may run concurrently.
type Store struct {
	o         Options
	core      *minio.Core
	transport *http.Transport // nil if Options.Transport was given
	places    chan struct{}   // one for each request in progress
	count     [counts]atomic.Uint64
	plain     atomic.Bool // the service does not support If-None-Match
	condition *remote.Condition

	// allowed is set while the keys are known to be valid: some request succeeded, and since then
	// the service refused nothing but reads of objects that may not exist.
	allowed      atomic.Bool
	hiddenLogged atomic.Bool
}

var _ pool.Store = (*Store)(nil)

// Open returns a store without contacting the service. A service that does not answer later makes
// the store Lost. The error is about options.
func Open(o Options) (*Store, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	s := &Store{o: o, places: make(chan struct{}, o.Concurrency), condition: remote.NewCondition(remote.OK, o.OnState)}
	transport := o.Transport
	if transport == nil {
		s.transport = newTransport(&o)
		s.transport.TLSClientConfig = o.TLS
		s.transport.MaxIdleConns, s.transport.MaxIdleConnsPerHost = o.Concurrency, o.Concurrency
		s.transport.IdleConnTimeout = time.Minute
		s.transport.WriteBufferSize, s.transport.ReadBufferSize = 16<<10, 16<<10
		transport = s.transport
	}
	core, err := o.client(bounded{transport})
	if err != nil {
		return nil, err
	}
	s.core = core
	return s, nil
}

// Close closes idle connections. Calls in progress end with their contexts.
func (s *Store) Close() error {
	if s.transport != nil {
		s.transport.CloseIdleConnections()
	}
	return nil
}

// The parts of object names after the prefix.
const (
	blocksPart = "blocks/"
	resetsPart = "resets/"
)

func (s *Store) name(k *pool.Key) string {
	part := blocksPart
	if k.Space == pool.EpochMarkers {
		part = resetsPart
	}
	return remote.Name(s.o.Prefix+part, k)
}

// each calls do for every i below n, many concurrently, and returns when all calls have ended. It
// returns ctx's error, or an error of do if all calls failed because the service did not answer.
func (s *Store) each(ctx context.Context, n int, do func(i int) error) error {
	var group sync.WaitGroup
	var mu sync.Mutex
	var failed error
	failures := 0
	for i := range n {
		select {
		case s.places <- struct{}{}:
		case <-ctx.Done():
			group.Wait()
			return ctx.Err()
		}
		group.Go(func() {
			defer func() { <-s.places }()
			if err := do(i); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failures, failed = failures+1, err
			}
		})
	}
	group.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	if failures == n {
		return failed
	}
	return nil
}

// Exists implements pool.Store: OK or Missing.
func (s *Store) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	return s.each(ctx, len(keys), func(i int) error {
		status[i] = pool.Missing
		if !remote.Valid(&keys[i]) {
			status[i] = pool.Invalid
			return nil
		}
		_, err := s.core.StatObject(ctx, s.o.Bucket, s.name(&keys[i]), minio.StatObjectOptions{})
		switch s.judgeRead(ctx, err) {
		case done:
			status[i] = pool.OK
		case silence:
			return err
		}
		return nil
	})
}

// Delete implements pool.Store.
func (s *Store) Delete(ctx context.Context, keys []pool.Key) error {
	return s.each(ctx, len(keys), func(i int) error {
		if !remote.Valid(&keys[i]) {
			return nil
		}
		return s.remove(ctx, &keys[i])
	})
}

func (s *Store) remove(ctx context.Context, k *pool.Key) error {
	err := s.core.RemoveObject(ctx, s.o.Bucket, s.name(k), minio.RemoveObjectOptions{})
	if s.judge(ctx, err) == silence {
		return err
	}
	return nil
}

// Counts of a store since it was opened.
const (
	countErrors = iota // requests without an answer
	countDenied        // requests refused for lack of permission, or of the bucket
	countHidden        // refused requests taken for a miss: the keys may not list the bucket
	countSlow          // requests refused because there are too many, or with an internal error of the service
	countFailed        // requests refused for another reason
	counts
)

// countNames are their names in reports.
var countNames = [counts]string{
	countErrors: "unanswered", countDenied: "denied", countHidden: "hidden", countSlow: "slow",
	countFailed: "refused",
}

var _ pool.Reporter = (*Store)(nil)

// Report implements pool.Reporter.
func (s *Store) Report() pool.StoreReport { return s.condition.Report(countNames[:], s.count[:]) }

// State returns the current state.
func (s *Store) State() remote.State { return s.condition.State() }

// Usage returns nothing: a bucket does not report its contents.
func (s *Store) Usage() pool.Usage { return pool.Usage{} }

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

// errHidden is passed to OnState once, with the state as it is, if the keys may not list.
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

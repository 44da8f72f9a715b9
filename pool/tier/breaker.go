package tier

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/backoff"
)

// breaker stops calls to a store that fails. It opens after a number of failures in a row; while it
// is open only the level's monitor calls the store.
type breaker struct {
	closed atomic.Bool // the store may be called

	mu       sync.Mutex
	failures int // in a row
	backoff  backoff.Backoff
	err      error // the last one
	opened   uint64
}

// failed counts a failure and reports whether it opened the breaker.
func (b *breaker) failed(t *Tier, err error) (opens bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = err
	b.failures++
	if b.failures < t.BreakAfter || !b.closed.Load() {
		return false
	}
	b.closed.Store(false)
	b.opened++
	b.backoff.First, b.backoff.Last = t.BreakFirst, t.BreakLast
	b.backoff.Next()
	return true
}

// worked ends a row of failures while the breaker is closed.
func (b *breaker) worked() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		b.failures = 0
		b.backoff.Reset()
	}
}

// try makes one call for the monitor: success closes the breaker, failure doubles the pause.
func (b *breaker) try(call func() error) error {
	err := call()
	b.mu.Lock()
	defer b.mu.Unlock()
	if err == nil {
		b.failures = 0
		b.closed.Store(true)
		return nil
	}
	b.err = err
	b.backoff.Next()
	return err
}

// briefPause is the longest pause of a breaker at which its store may be back soon. It doubles with
// each try that fails: from 500 ms on, it is longer 3.5 s, and the time of three tries, after the
// breaker has opened.
const briefPause = 2 * time.Second

// brief reports whether the store may be back soon. Stores that answer late on a busy machine open
// the breaker, too.
func (b *breaker) brief() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.backoff.Pause() <= briefPause
}

func (b *breaker) state() (name string, opened uint64, pause time.Duration, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	name = "open"
	if b.closed.Load() {
		name = "up"
	}
	return name, b.opened, b.backoff.Pause(), b.err
}

package tier

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/backoff"
)

// call is a kind of call to a store. One that moves no values may still answer questions, as a disk
// does from memory.
type call uint8

const (
	asks  call = iota // Exists, Delete
	moves             // Put, Get
	calls
)

// breaker stops calls to a store that fails. It opens after a number of failures of one kind in a
// row; while it is open only the level's monitor calls the store.
type breaker struct {
	closed atomic.Bool // the store may be called

	mu       sync.Mutex
	failures [calls]int // in a row
	backoff  backoff.Backoff
	err      error // the last one
	opened   uint64
}

// failed counts a failure and reports whether it opened the breaker.
func (b *breaker) failed(t *Tier, c call, err error) (opens bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = err
	b.failures[c]++
	if b.failures[c] < t.BreakAfter || !b.closed.Load() {
		return false
	}
	b.closed.Store(false)
	b.opened++
	b.backoff.First, b.backoff.Last = t.BreakFirst, t.BreakLast
	b.backoff.Next()
	return true
}

// worked ends a row of failures while the breaker is closed.
func (b *breaker) worked(c call) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		b.failures[c] = 0
		if b.failures == [calls]int{} {
			b.backoff.Reset()
		}
	}
}

// try asks a question for the monitor: an answer closes the breaker, failure doubles the pause. If
// values have failed, the next one that fails opens it again, for a longer pause.
func (b *breaker) try(t *Tier, ask func() error) error {
	err := ask()
	b.mu.Lock()
	defer b.mu.Unlock()
	if err == nil {
		b.failures = [calls]int{moves: min(b.failures[moves], t.BreakAfter-1)}
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

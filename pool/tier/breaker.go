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
	tries    uint64
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
	b.mu.Lock()
	b.tries++
	b.mu.Unlock()
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
// each try that fails: from 500 ms on, it is longer 3.5 s after the breaker has opened.
const briefPause = 2 * time.Second

// brief reports whether the store may be back soon. Stores that answer late on a busy machine open
// the breaker, too.
func (b *breaker) brief() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.backoff.Pause() <= briefPause
}

func (b *breaker) state() (name string, opened, tries uint64, pause time.Duration, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	name = "open"
	if b.closed.Load() {
		name = "up"
	}
	return name, b.opened, b.tries, b.backoff.Pause(), b.err
}

// storeSpeed measures how fast a store is.
type storeSpeed struct {
	mu            sync.Mutex
	get, put, ask float64 // seconds of a batch, or of a question; moving averages

	running int       // fetches
	since   time.Time // some run
	bytes   float64   // fetched
	seconds float64   // in which fetches ran, before since
}

const speedWeight = 0.2 // of a new value

func smooth(old, now float64) float64 {
	if old == 0 {
		return now
	}
	return old + speedWeight*(now-old)
}

// fetching begins a Get.
func (p *storeSpeed) fetching() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running++; p.running == 1 {
		p.since = time.Now()
	}
}

// fetched ends a Get that read bytes; 0 if it failed.
func (p *storeSpeed) fetched(bytes int64, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.get = smooth(p.get, took.Seconds())
	p.bytes += float64(bytes)
	if p.running--; p.running == 0 {
		p.seconds += time.Since(p.since).Seconds()
	}
}

func (p *storeSpeed) stored(took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.put = smooth(p.put, took.Seconds())
}

func (p *storeSpeed) asked(took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ask = smooth(p.ask, took.Seconds())
}

// report returns bytes a second while fetches ran, and seconds of a Get, a Put and a question.
func (p *storeSpeed) report() (rate, get, put, ask float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	seconds := p.seconds
	if p.running > 0 {
		seconds += time.Since(p.since).Seconds()
	}
	return p.bytes / max(seconds, 1e-6), p.get, p.put, p.ask
}

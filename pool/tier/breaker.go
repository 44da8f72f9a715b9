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
	testing  bool // half-open: the monitor is calling
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
	b.testing = true
	b.tries++
	b.mu.Unlock()
	err := call()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.testing = false
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

// state returns the breaker's state for reports.
func (b *breaker) state() (name string, opened, tries uint64, pause time.Duration, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closed.Load():
		name = "up"
	case b.testing:
		name = "half-open"
	default:
		name = "open"
	}
	return name, b.opened, b.tries, b.backoff.Pause(), b.err
}

// storeSpeed measures how fast a store is, as moving averages.
type storeSpeed struct {
	mu       sync.Mutex
	delay    float64 // seconds until a small question is answered
	get, put float64 // seconds of a batch
	ask      float64

	// Several fetches run at once, so the bytes of all of them in a busy period count.
	running int
	since   time.Time // the period began
	arrived int64     // bytes in this period
	bytes   float64   // of past periods; weighted less the more seconds of work ago
	seconds float64   // of past periods
}

const (
	speedWeight = 0.2         // of a new value
	speedSpan   = time.Second // longest period, so that a tier that is always busy is measured too
)

func smooth(old, now float64) float64 {
	if old == 0 {
		return now
	}
	return old + speedWeight*(now-old)
}

// fetching begins a Get.
func (p *storeSpeed) fetching(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running++; p.running == 1 {
		p.since, p.arrived = now, 0
	}
}

// fetched ends a Get that read bytes; 0 if it failed.
func (p *storeSpeed) fetched(bytes int64, took time.Duration, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.get = smooth(p.get, took.Seconds())
	p.running--
	p.arrived += bytes
	if p.running == 0 || now.Sub(p.since) > speedSpan {
		p.endPeriodLocked(now)
	}
}

// endPeriodLocked ends a busy period. It subtracts the store's delay: the rate is of bytes
// alone.
func (p *storeSpeed) endPeriodLocked(now time.Time) {
	if p.arrived > 0 {
		took := now.Sub(p.since).Seconds()
		keep := 1 - speedWeight*min(took/speedSpan.Seconds(), 1)
		p.bytes = keep*p.bytes + float64(p.arrived)
		p.seconds = keep*p.seconds + max(took-p.delay, took/4, 1e-6)
	}
	p.since, p.arrived = now, 0
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
	p.delay = p.ask
}

// rateLocked returns bytes a second over all fetches at once; 0 if not measured. Large fetches
// weigh more.
func (p *storeSpeed) rateLocked() float64 {
	if p.seconds == 0 {
		return 0
	}
	return p.bytes / p.seconds
}

// report returns bytes a second, and the seconds of a Get, a Put and a question.
func (p *storeSpeed) report() (rate, get, put, ask float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rateLocked(), p.get, p.put, p.ask
}

package tier

import (
	"sync"
	"time"
)

// pace is how fast a store was, as moving averages.
type pace struct {
	mu       sync.Mutex
	delay    float64 // seconds until a small question is answered
	get, put float64 // seconds of a batch
	ask      float64
	measured time.Time // the last Get

	// Fetches at work, several at once: what they bring in a stretch of time counts, not what each of them does.
	running int
	since   time.Time // the stretch began
	came    int64     // bytes in it
	bytes   float64   // of past stretches, with less weight the more seconds of work ago
	seconds float64   // of those
}

const (
	paceWeight = 0.2              // of a new value
	paceAge    = 10 * time.Second // a rate is doubled for each such time without a Get, so that a tier that was slow once is tried again
	paceSpan   = time.Second      // longest stretch: a tier that is always at work is measured too
)

func smooth(old, now float64) float64 {
	if old == 0 {
		return now
	}
	return old + paceWeight*(now-old)
}

// fetching is the begin of a Get.
func (p *pace) fetching(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running++; p.running == 1 {
		p.since, p.came = now, 0
	}
}

// fetched is the end of a Get that brought bytes, or none because it failed.
func (p *pace) fetched(bytes int64, took time.Duration, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.get = smooth(p.get, took.Seconds())
	p.measured = now
	p.running--
	p.came += bytes
	if p.running == 0 || now.Sub(p.since) > paceSpan {
		p.stretchLocked(now)
	}
}

// stretchLocked ends a stretch. The store's answering delay, which seconds adds again, does not count as time of its bytes.
func (p *pace) stretchLocked(now time.Time) {
	if p.came > 0 {
		took := now.Sub(p.since).Seconds()
		keep := 1 - paceWeight*min(took/paceSpan.Seconds(), 1)
		p.bytes = keep*p.bytes + float64(p.came)
		p.seconds = keep*p.seconds + max(took-p.delay, took/4, 1e-6)
	}
	p.since, p.came = now, 0
}

func (p *pace) stored(took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.put = smooth(p.put, took.Seconds())
}

func (p *pace) asked(took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ask = smooth(p.ask, took.Seconds())
	p.delay = p.ask
}

// rateLocked is bytes a second of what is at work at once; 0: not measured. Large fetches count for more than small ones.
func (p *pace) rateLocked() float64 {
	if p.seconds == 0 {
		return 0
	}
	return p.bytes / p.seconds
}

// secondsFor is how long so many bytes would take, as far as that was measured.
func (p *pace) secondsFor(bytes int64, now time.Time) float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	rate := p.rateLocked()
	if rate == 0 {
		return 0
	}
	for age := now.Sub(p.measured); age > paceAge && rate < 1e12; age -= paceAge {
		rate *= 2
	}
	return p.delay + float64(bytes)/rate
}

// shown is what is said of it: bytes a second, and seconds of a batch or a question.
func (p *pace) shown() (rate, get, put, ask float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rateLocked(), p.get, p.put, p.ask
}

package tier

import (
	"sync"
	"time"
)

// pace is how fast a store was, as moving averages.
type pace struct {
	mu       sync.Mutex
	rate     float64 // bytes a second of a Get; 0: not measured
	delay    float64 // seconds until a small question is answered
	get, put float64 // seconds of a batch
	ask      float64
	measured time.Time // the last Get
}

const (
	paceWeight = 0.2              // of a new value
	paceAge    = 10 * time.Second // a rate is doubled for each such time without a Get, so that a tier that was slow once is tried again
)

func smooth(old, now float64) float64 {
	if old == 0 {
		return now
	}
	return old + paceWeight*(now-old)
}

func (p *pace) fetched(bytes int64, took time.Duration, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.get = smooth(p.get, took.Seconds())
	if bytes > 0 {
		p.rate = smooth(p.rate, float64(bytes)/max(took.Seconds(), 1e-6))
	}
	p.measured = now
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

// seconds is how long so many bytes would take, as far as that was measured.
func (p *pace) seconds(bytes int64, now time.Time) float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.rate == 0 {
		return 0
	}
	rate := p.rate
	for age := now.Sub(p.measured); age > paceAge && rate < 1e12; age -= paceAge {
		rate *= 2
	}
	return p.delay + float64(bytes)/rate
}

// shown is what is said of it: bytes a second, and seconds of a batch or a question.
func (p *pace) shown() (rate, get, put, ask float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rate, p.get, p.put, p.ask
}

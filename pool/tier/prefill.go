package tier

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// What is learned of how fast engines compute.
const (
	prefillSamples = 64  // the last so many count
	prefillEnough  = 16  // nothing is cut before there are so many
	prefillTokens  = 256 // of a step that counts: one of fewer tokens is about decoding, or has little more than a step's fixed cost
	prefillRank    = 3   // of four: the sample that three quarters are not above. Steps that decode too are slower, and hold no prompt back
)

// prefill is how fast engines of a space compute prompts.
type prefill struct {
	rate atomic.Uint64 // tokens a second, rounded; 0: not known

	mu      sync.Mutex
	samples []float64 // tokens a second; the oldest is at next once there are prefillSamples
	next    int
}

// took notes a step.
func (f *prefill) took(tokens int, d time.Duration) {
	if tokens < prefillTokens || d <= 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	sample := float64(tokens) / d.Seconds()
	if len(f.samples) < prefillSamples {
		f.samples = append(f.samples, sample)
	} else {
		f.samples[f.next] = sample
		f.next = (f.next + 1) % prefillSamples
	}
	if len(f.samples) < prefillEnough {
		return
	}
	sorted := slices.Sorted(slices.Values(f.samples))
	f.rate.Store(uint64(min(sorted[(len(sorted)-1)*prefillRank/4], maxPrefill)) + 1)
}

// Computed implements pool.Tiers.
func (p *Pool) Computed(s pool.SpaceID, tokens int, d time.Duration) {
	if sp := p.spaces.get(s); sp != nil && p.o.LearnPrefill {
		sp.prefill.took(tokens, d)
	}
}

// tokensPerSecond is what engines of a space compute: what was given, else what was learned. 0: not known, and nothing is cut.
func (p *Pool) tokensPerSecond(sp *space) float64 {
	if p.o.LearnPrefill {
		return float64(sp.prefill.rate.Load())
	}
	return p.o.PrefillTokens
}

// slow says that a tier brings a block up more slowly than an engine computes it.
func (p *Pool) slow(l *lane, sp *space, g *group) bool {
	rate := p.tokensPerSecond(sp)
	if rate == 0 || g.tokens == 0 {
		return false
	}
	const many = 1 << 10 // so many blocks that the delay of the first does not count
	return l.pace.secondsFor(many*g.memory, p.now()) > many*float64(g.tokens)/rate
}

// worth cuts a chain at n, where memory's part ends, if bringing up the rest would take longer than computing it. What it cuts costs its computing, as without
// tiers, and no more; what it should have cut costs its loading, which a load waits for no longer than for an event.
func (p *Pool) worth(where []int8, sp *space, g *group, n, end int) int {
	rate := p.tokensPerSecond(sp)
	if rate == 0 || end == n {
		return end
	}
	var bytes [MaxTiers]int64
	for _, at := range where {
		if at >= 0 {
			bytes[at] += g.memory
		}
	}
	seconds := 0.0
	for i, b := range bytes {
		if b > 0 {
			seconds += p.lanes[i].pace.secondsFor(b, p.now())
		}
	}
	if seconds > float64(end-n)*float64(g.tokens)/rate {
		return n
	}
	return end
}

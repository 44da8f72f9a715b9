package tier

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Learning how fast engines compute prompts.
const (
	prefillSamples = 64  // samples that are kept
	prefillEnough  = 16  // samples before any answer is cut
	prefillTokens  = 256 // least tokens of a step that counts; a smaller one is decoding or mostly fixed cost
	// prefillRank quarters of the samples are not above the one that is used. Steps that also
	// decode are slower and should not count.
	prefillRank = 3
)

// prefill measures how fast the engines of a space compute prompts.
type prefill struct {
	rate atomic.Uint64 // tokens a second, rounded; 0 if unknown

	mu      sync.Mutex
	samples []float64 // tokens a second; the oldest is at next once there are prefillSamples
	next    int
}

// add adds a step.
func (f *prefill) add(tokens int, d time.Duration) {
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
		sp.prefill.add(tokens, d)
	}
}

// tokensPerSecond returns the configured or learned rate of a space's engines; 0 if unknown, and
// then nothing is cut.
func (p *Pool) tokensPerSecond(sp *space) float64 {
	if p.o.LearnPrefill {
		return float64(sp.prefill.rate.Load())
	}
	return p.o.PrefillTokens
}

// slow reports whether a tier loads blocks more slowly than an engine computes them.
func (p *Pool) slow(l *level, sp *space, g *group) bool {
	rate := p.tokensPerSecond(sp)
	if rate == 0 || g.tokens == 0 {
		return false
	}
	const many = 1 << 10 // so many blocks that the delay of the first does not matter
	return l.speed.secondsFor(many*g.memory, p.now()) > many*float64(g.tokens)/rate
}

// cutSlow returns the end of the part of a chain that is worth loading: n, where memory's part
// ends, if loading the rest would take longer than computing it, else end.
func (p *Pool) cutSlow(where []int8, sp *space, g *group, n, end int) int {
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
			seconds += p.levels[i].speed.secondsFor(b, p.now())
		}
	}
	if seconds > float64(end-n)*float64(g.tokens)/rate {
		return n
	}
	return end
}

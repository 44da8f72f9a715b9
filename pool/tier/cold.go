package tier

import (
	"context"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Writing what is about to go. Eviction waits for nobody: so the coldest entries are written while memory is nearly full, before they go. What the tier is too slow for, and what a policy evicts out of turn, is not written.
const (
	coldEvery = 20 * time.Millisecond
	coldFrom  = 0.9 // part of memory in use
	coldMany  = 256 // entries looked at each time
)

// chill offers the coldest entries to the tiers that write on eviction.
func (p *Pool) chill(ctx context.Context) {
	tick := time.NewTicker(coldEvery)
	defer tick.Stop()
	out := make([]pool.Cold, coldMany)
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if s := p.memory.Stats(); float64(s.Used) < coldFrom*float64(s.Capacity) {
			continue
		}
		for _, cold := range out[:p.o.chilling.Coldest(out)] {
			p.offerCold(&cold)
		}
	}
}

func (p *Pool) offerCold(cold *pool.Cold) {
	sp := p.spaces.get(cold.Space)
	if sp.group(cold.Group) == nil {
		return
	}
	o := origin{key: entryKey{cold.Space, cold.Group, cold.Hash}, sp: sp, life: sp.now.Load()}
	p.offerUnwritten(&o, OnEvict)
}

// offerUnwritten offers an entry to the tiers with an occasion, as far as they were not given it before.
func (p *Pool) offerUnwritten(o *origin, when When) {
	print, now := o.print(), p.now()
	for _, l := range p.lanes {
		if l.Write != when {
			continue
		}
		if there, _ := l.written.get(print, now); !there {
			p.mu.Lock()
			l.offerLocked(*o)
			p.mu.Unlock()
		}
	}
}

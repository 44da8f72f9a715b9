package tier

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Writing what is about to go. While memory is nearly full the next entries to be evicted are copied to staging and written from there: in the background, and again
// before each reservation, which may evict them. Eviction waits for that copy, and not for the tier. What finds no staging is written as long as memory still has it; what
// the memory's policy evicts out of turn is not written.
const (
	coldEvery  = 20 * time.Millisecond
	coldFrom   = 0.9 // part of memory in use
	coldMany   = 256 // entries looked at each time
	coldCopies = 4   // part of staging that their copies may have: 1 / this, half of what writers have
)

// chill is what is written on eviction.
type chill struct {
	memory pool.Chilling // nil: no tier writes on eviction
	near   atomic.Bool   // memory is nearly full

	mu     sync.Mutex // one look at a time
	closed bool       // staging is about to go
	out    []pool.Cold
}

// close waits for a look that is under way; there is none behind it.
func (c *chill) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
}

// chillAlways looks at the coldest entries all the time.
func (p *Pool) chillAlways(ctx context.Context) {
	tick := time.NewTicker(coldEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s := p.memory.Stats()
		p.chill.near.Store(float64(s.Used) >= coldFrom*float64(s.Capacity))
		p.chillNow()
	}
}

// chillNow offers the coldest entries to the tiers that write on eviction, while memory is nearly full.
func (p *Pool) chillNow() {
	c := &p.chill
	if c.memory == nil || !c.near.Load() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	for _, cold := range c.out[:c.memory.Coldest(c.out)] {
		p.offerCold(&cold)
	}
}

func (p *Pool) offerCold(cold *pool.Cold) {
	sp := p.spaces.get(cold.Space)
	g := sp.group(cold.Group)
	if g == nil {
		return
	}
	o := origin{key: entryKey{cold.Space, cold.Group, cold.Hash}, sp: sp, life: sp.now.Load()}
	print, now := o.print(), p.now()
	for _, l := range p.lanes {
		if l.Write != OnEvict {
			continue
		}
		if there, _ := l.written.get(print, now); there || l.waits(&o) {
			continue
		}
		it := putItem{origin: o}
		if p.copied.Load()+g.staged <= int64(len(p.o.Staging.base))/coldCopies {
			if e, ok := p.copyOut(&o); ok {
				it.copied = &e
				p.copied.Add(e.loan.size)
			}
		}
		p.mu.Lock()
		queued := l.queueLocked(it)
		p.mu.Unlock()
		if !queued {
			p.giveNow(p.copies([]putItem{it})...)
			continue
		}
		l.written.put(print, true, now.Add(l.PutWithin)) // nearly: so that it is not copied again while it is written
	}
}

// waits says whether an entry is in the queue.
func (l *lane) waits(o *origin) bool {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	return l.puts.set[o.key] == o.life
}

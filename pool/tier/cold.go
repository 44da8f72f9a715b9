package tier

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Writing what is about to go. While memory is nearly full the next entries to be evicted are copied to staging and written from there: in the background, and again
// before each reservation, which may evict them. Eviction waits for that copy, and not for the tier. What finds no staging is written as long as memory still has it; what
// the memory's policy evicts out of turn is not written, nor what goes while the tier is down: a copy that nobody takes would only cost saves their time.
const (
	coldEvery  = 20 * time.Millisecond
	coldFrom   = 0.9 // part of memory in use
	coldMany   = 256 // entries looked at each time
	coldCopies = 4   // part of staging that all their copies may have: 1 / this, half of what writers have; each tier that writes on eviction has an equal share of it
)

// chill is what is written on eviction.
type chill struct {
	lanes []*lane     // that write on eviction
	near  atomic.Bool // memory is nearly full

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
	if len(c.lanes) == 0 || !c.near.Load() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || !slices.ContainsFunc(c.lanes, (*lane).up) {
		return
	}
	for _, cold := range c.out[:p.chilling.Coldest(c.out)] {
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
	for _, l := range p.chill.lanes {
		if there, _ := l.written.get(print, now); !there && l.up() && l.takes(&o) && l.queueCold(&o, g) {
			l.written.put(print, true, now.Add(l.PutWithin)) // nearly: so that it is not copied again while it is written
		}
	}
}

// takes says whether an entry that is about to go would be queued now.
func (l *lane) takes(o *origin) bool {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	return l.takesLocked(o)
}

// queueCold queues an entry that is about to go, copied as far as the tier's share of staging has room.
func (l *lane) queueCold(o *origin, g *group) bool {
	p := l.p
	it := putItem{origin: *o}
	if l.copied.Load()+g.staged <= p.o.Staging.Size()/coldCopies/int64(len(p.chill.lanes)) {
		if e, ok := p.copyOut(o); ok {
			it.copied = &e
			l.copied.Add(e.loan.Size)
		}
	}
	p.mu.Lock()
	queued := l.queueLocked(it)
	p.mu.Unlock()
	if !queued {
		p.giveNow(l.copies([]putItem{it})...)
	}
	return queued
}

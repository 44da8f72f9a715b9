package tier

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Writing on eviction. While memory is nearly full, the next entries to be evicted are copied to
// staging, both periodically and before each reservation, and written to the tiers from there.
// An entry for which staging has no room is written only if memory still holds it by then. Entries
// that a policy evicts out of turn, or while the tier is down, are not written.
const (
	coldEvery = 20 * time.Millisecond
	coldFrom  = 0.9 // part of memory in use above which entries are copied
	coldMany  = 256 // entries examined each time
	// coldCopies is the part of staging that all copies together may take: 1/coldCopies, half of
	// what writers may take. Each tier that writes on eviction has an equal share.
	coldCopies = 4
)

// evictWriter offers entries that are about to be evicted to the tiers that write on eviction.
type evictWriter struct {
	levels []*level    // that write on eviction
	near   atomic.Bool // memory is nearly full

	mu     sync.Mutex // held while the coldest entries are examined
	closed bool       // staging is about to be unmapped
	out    []pool.Cold
}

// close waits for an examination in progress and prevents further ones.
func (c *evictWriter) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
}

// evictLoop offers the coldest entries periodically.
func (p *Pool) evictLoop(ctx context.Context) {
	tick := time.NewTicker(coldEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s := p.Memory.Stats()
		p.onEvict.near.Store(float64(s.Used) >= coldFrom*float64(s.Capacity))
		p.offerColdest()
	}
}

// offerColdest offers the coldest entries to the tiers that write on eviction while memory is
// nearly full.
func (p *Pool) offerColdest() {
	c := &p.onEvict
	if len(c.levels) == 0 || !c.near.Load() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || !slices.ContainsFunc(c.levels, (*level).up) {
		return
	}
	for _, cold := range c.out[:p.Coldest(c.out)] {
		p.offerCold(&cold)
	}
}

func (p *Pool) offerCold(cold *pool.Cold) {
	sp := p.spaces.get(cold.Space)
	g := sp.group(cold.Group)
	if g == nil {
		return
	}
	o := origin{key: entryKey{cold.Space, cold.Group, cold.Hash}, sp: sp, era: sp.now.Load()}
	digest, now := o.digest(), p.now()
	for _, l := range p.onEvict.levels {
		if there, _ := l.written.get(digest, now); !there && l.up() && l.accepts(&o) && l.queueCold(&o, g) {
			// Not written yet, but it must not be copied again meanwhile.
			l.written.put(digest, true, now.Add(l.PutWithin))
		}
	}
}

// accepts reports whether an entry would be queued now.
func (l *level) accepts(o *origin) bool {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	return l.acceptsLocked(o)
}

// queueCold queues an entry, and copies it first if the tier's share of staging has room.
func (l *level) queueCold(o *origin, g *group) bool {
	p := l.p
	it := putItem{origin: *o}
	if l.copied.Load()+g.staged <= p.o.Staging.Size()/coldCopies/int64(len(p.onEvict.levels)) {
		if e, ok := p.copyOut(o); ok {
			it.copied = &e
			l.copied.Add(e.loan.Size)
		}
	}
	p.mu.Lock()
	queued := l.queueLocked(it)
	p.mu.Unlock()
	if !queued {
		p.returnLoans(l.takeCopies([]putItem{it})...)
	}
	return queued
}

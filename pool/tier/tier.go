// Package tier is a pool with stores below its memory: it finds evicted blocks in them and brings
// them back before they are needed.
//
//	look-up ──▶ Index: memory, then what the tiers are believed to have
//	              │ local tiers: asked directly
//	              │ shared tiers: Ask, in the background, within the look-up's deadline
//	              ▼
//	            Pin: a pin, or a promise ──▶ queue ──▶ Get ──▶ verify ──▶ install ──▶ Settle
//	save ─────▶ Commit ──▶ queue ──▶ exists? ──▶ copy to staging ──▶ Put
//	reset ────▶ names: another name in the tiers ──▶ a new epoch of memory ──▶ a new era
//
// Stores may be slow, full, wrong or unreachable at any time. Look-ups then find less, but are
// never wrong, nor late by more than a timer's delay. No store touches the arena: values travel
// through transit.Staging, so a store that writes after its call was given up cannot harm a block,
// and a slot is reserved only for verified bytes.
package tier

import (
	"cmp"
	"container/list"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/names"
)

// Pool implements pool.Memory and pool.Tiers. What it does not define itself is memory's alone:
// Acquire, since promises were settled before a load; owners, hints, and notes of entries that come
// and go. Its methods may run concurrently. Locks are taken in the following order. No store and no
// caller's function is called under any of them, except a local store's Exists and the memory's own
// methods.
//
//	names.changeMu  a reset or another change of names; held while it is written to disk
//	spaces.mu       a space opens, closes, or begins another era
//	names.mu        the catalog
//	mu              promises, queues
//	a level's exists.mu, breaker.mu, count.mu; staging.mu
//
// An era takes its name under spaces.mu, by names.Use. A later change of the name is reported
// by Changed, which takes spaces.mu and asks again: so the last era has the last name, though
// names.mu is not held when it begins.
type Pool struct {
	pool.Memory
	arena   []byte
	o       Options
	levels  []*level
	saving  bool // some level writes on save
	using   bool // some level writes on second use
	spaces  spaces
	names   *names.Names
	uses    chan use
	storage *storage // nil: no local tier notes what comes and goes

	mu struct {
		sync.Mutex
		closed    bool
		lastID    uint64
		open      map[entryKey]*promise // the latest promise of each entry, until it is settled
		byID      map[uint64]*promise   // every promise that is open or has pins
		deadlines list.List             // every open promise, by deadline, which is the order they were made in
		bytes     int64                 // of open promises
		writing   map[reservation]origin
		promised  uint64 // made
		installed uint64
		failed    uint64
		dropped   uint64 // cancelled
		expired   uint64 // open at their deadline
	}

	cancel  context.CancelFunc
	workers sync.WaitGroup
}

var (
	_ pool.Memory = (*Pool)(nil)
	_ pool.Tiers  = (*Pool)(nil)
)

// entryKey identifies an entry in this process.
type entryKey struct {
	space pool.SpaceID
	group uint8
	hash  pool.Hash
}

// Open returns a pool of a memory and tiers, nearest first, which the caller closes after it.
func Open(m pool.Memory, tiers []Tier, o Options) (*Pool, error) {
	if err := o.complete(m); err != nil {
		return nil, err
	}
	if len(tiers) > MaxTiers {
		return nil, fmt.Errorf("tier: %d tiers, allowed: at most %d", len(tiers), MaxTiers)
	}
	p := &Pool{Memory: m, o: o, uses: make(chan use, queuedUses)}
	p.arena, _ = m.Arena()
	p.mu.open, p.mu.byID = make(map[entryKey]*promise), make(map[uint64]*promise)
	p.mu.writing = make(map[reservation]origin)
	for i := range tiers {
		l, err := p.newLevel(i, tiers[i])
		if err != nil {
			return nil, err
		}
		p.levels = append(p.levels, l)
		p.saving = p.saving || l.Write == OnSave
		p.using = p.using || l.Write == OnSecondUse
	}
	all := time.Duration(0)
	for _, l := range p.levels {
		all += l.FetchWithin
	}
	p.o.PromiseWithin = cmp.Or(p.o.PromiseWithin, max(time.Minute, 2*all))
	p.spaces.all.Store(&[]*space{})
	p.storage = newStorage(p)
	if err := p.openNames(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel = cancel
	p.start(ctx)
	return p, nil
}

// start starts the goroutines of the pool; Close ends them.
func (p *Pool) start(ctx context.Context) {
	if p.using {
		p.workers.Go(func() { p.offerUses(ctx) })
	}
	if len(p.levels) > 0 {
		p.workers.Go(func() { p.sweep(ctx) })
		p.workers.Go(func() { p.names.Run(ctx) })
	}
	for _, l := range p.levels {
		for range l.Workers {
			p.workers.Go(func() { l.work(ctx) })
		}
		if !l.Local {
			for range l.Askers {
				p.workers.Go(func() { l.askLoop(ctx) })
			}
		}
		p.workers.Go(func() { l.monitor(ctx) })
	}
}

// Close settles every promise, failing those that are open, then ends all work below memory and
// waits for it. Memory stays open.
func (p *Pool) Close() error {
	p.mu.Lock()
	if p.mu.closed {
		p.mu.Unlock()
		return pool.ErrClosed
	}
	p.mu.closed = true
	p.mu.Unlock()
	p.cancel()
	for _, l := range p.levels {
		l.wake.Broadcast()
	}
	p.settleAll()
	p.o.Staging.End()
	p.workers.Wait()
	for _, l := range p.levels {
		p.requeueAll(l)
	}
	if p.o.ownStaging {
		return p.o.Staging.Close()
	}
	return nil
}

// errClosing fails what is in progress when the pool closes.
var errClosing = errors.New("tier: the stack is closing")

func (p *Pool) now() time.Time { return p.o.Clock() }

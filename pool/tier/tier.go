// Package tier is a pool with stores below its memory: what memory forgets is found in them again, and brought back before it is needed.
//
//	look-up ──▶ Index: memory, then what the tiers are known to have
//	                    │ local tiers: asked at once          shared tiers: Ask, in flight, within the look-up's deadline
//	                    ▼
//	            Pin: a pin, or a promise ──▶ queue of a tier ──▶ Get ──▶ verify ──▶ reserve, copy, commit, pin ──▶ Settle
//	save ─────▶ Commit ──▶ queue of a tier ──▶ exists? ──▶ pin, copy, release ──▶ Put
//
// Everything below memory may be slow, full, wrong or gone at any time: look-ups get shorter then, never wrong, and later than their
// deadline only by what a timer is late. No store ever touches the arena: values travel through Staging, so that a store that writes
// after it was given up writes nobody's block, and a slot is taken only for bytes that were verified.
package tier

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Memory is the pool on top: its three views, and the arena its slots lie in.
type Memory interface {
	pool.Index
	pool.Slots
	pool.Spaces
	Arena() (base []byte, fd int)
}

// Pool implements pool.Index, pool.Slots, pool.Spaces and pool.Tiers. Its methods may run at once. Locks are taken in this order, and no
// store and no caller's function is called under any of them, but a local store's Exists, and the memory's own methods:
//
//	spaces.turning  a space is reset, or what is kept changes; whoever has it may wait for the disk that keeps it
//	spaces.mu       a space opens, closes, or gets another name
//	mu              promises, queues
//	a lane's known.mu, breaker.mu, pace.mu; staging.mu
type Pool struct {
	memory   Memory
	chilling pool.WriteBack // memory; nil if it cannot do that
	arena    []byte
	o        Options
	lanes    []*lane
	saving   bool // some lane writes on save
	using    bool // some lane writes on second use
	spaces   spaces
	uses     uses
	chill    chill

	mu struct {
		sync.Mutex
		closed   bool
		lastID   uint64
		open     map[entryKey]*promise // the latest promise of each entry that is not settled, or landed and held
		byID     map[uint64]*promise   // every promise that somebody holds
		ages     ages                  // every promise that is open
		bytes    int64                 // of promises that are not settled
		writing  map[reservation]origin
		promised uint64 // ever
		landed   uint64
		failed   uint64
		dropped  uint64 // cancelled
		expired  uint64 // open at their deadline
	}

	cancel  context.CancelFunc
	workers sync.WaitGroup
}

var (
	_ pool.Index  = (*Pool)(nil)
	_ pool.Slots  = (*Pool)(nil)
	_ pool.Spaces = (*Pool)(nil)
	_ pool.Tiers  = (*Pool)(nil)
)

// entryKey names an entry in this process.
type entryKey struct {
	space pool.SpaceID
	group uint8
	hash  pool.Hash
}

// Open makes a stack of a memory and tiers, the nearest first; both stay the caller's, who closes them after the stack.
func Open(m Memory, tiers []Tier, o Options) (*Pool, error) {
	if err := o.complete(m); err != nil {
		return nil, err
	}
	if len(tiers) > MaxTiers {
		return nil, fmt.Errorf("tier: %d tiers, allowed: at most %d", len(tiers), MaxTiers)
	}
	p := &Pool{memory: m, o: o}
	p.chilling, _ = m.(pool.WriteBack)
	p.arena, _ = m.Arena()
	p.mu.open, p.mu.byID = make(map[entryKey]*promise), make(map[uint64]*promise)
	p.mu.writing = make(map[reservation]origin)
	for i := range tiers {
		l, err := p.newLane(i, tiers[i])
		if err != nil {
			return nil, err
		}
		p.lanes = append(p.lanes, l)
		p.saving = p.saving || l.Write == OnSave
		p.using = p.using || l.Write == OnSecondUse
		if l.Write == OnEvict {
			if p.chilling == nil {
				return nil, fmt.Errorf("tier %s: Write is evict, allowed with a memory that tells its coldest blocks", l.Name)
			}
			p.chill.lanes = append(p.chill.lanes, l)
		}
	}
	if err := p.completePromises(); err != nil {
		return nil, err
	}
	if err := p.spaces.open(&p.o); err != nil {
		return nil, err
	}
	p.uses.wake = make(chan struct{}, 1)
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel = cancel
	p.start(ctx)
	return p, nil
}

// start starts what works in the background; Close ends it.
func (p *Pool) start(ctx context.Context) {
	if p.using {
		p.workers.Go(func() { p.note(ctx) })
	}
	if len(p.chill.lanes) > 0 {
		p.chill.out = make([]pool.Cold, coldMany)
		p.workers.Go(func() { p.chillAlways(ctx) })
	}
	if len(p.lanes) > 0 {
		p.workers.Go(func() { p.sweep(ctx) })
		p.workers.Go(func() { p.keepAlways(ctx) })
		p.workers.Go(func() { p.collectAlways(ctx) })
	}
	for _, l := range p.lanes {
		for range l.Workers {
			p.workers.Go(func() { l.work(ctx) })
		}
		if !l.Local {
			for range l.Askers {
				p.workers.Go(func() { l.answer(ctx) })
			}
			p.workers.Go(func() { l.followAlways(ctx) })
		}
		p.workers.Go(func() { l.keep(ctx) })
	}
}

// Close settles every promise, whatever the stores do: what has not come does not come. Then it
// ends all work below memory, for which it waits. Memory goes on.
func (p *Pool) Close() error {
	p.mu.Lock()
	if p.mu.closed {
		p.mu.Unlock()
		return pool.ErrClosed
	}
	p.mu.closed = true
	p.mu.Unlock()
	p.cancel()
	for _, l := range p.lanes {
		l.wake.Broadcast()
	}
	p.settleAll()
	p.o.Staging.End()
	p.workers.Wait()
	p.chill.close()
	for _, l := range p.lanes {
		p.abandon(l)
		p.giveNow(l.copies(l.puts.list)...)
	}
	if p.o.ownStaging {
		return p.o.Staging.Close()
	}
	return nil
}

// errClosing is why things end with the stack.
var errClosing = errors.New("tier: the stack is closing")

// now is the clock of everything in the stack.
func (p *Pool) now() time.Time { return p.o.Clock() }

// Package dram keeps blocks in this node's memory: one arena of slabs, cut into slots of the sizes
// that the spaces need, and an index of at most 100 bytes per entry. The least recently used entry
// is evicted first (or the one that a policy chooses), a suffix before its prefix, and never an
// entry that is pinned or partly written.
//
//	hash table          headers                  slots            arena
//	8 bytes a bucket    64 + 8 bytes an entry    8 bytes each     slab | slab | slab ...
//	entry, tag ───────▶ key, order of eviction,
//	                    parent and children,
//	                    shard 0 ───────────────▶ shard 1 ─┐       place in the slab
//	                       ▲                     ...    ◀─┘       follows from the
//	                       └──────────────────── last shard       slot's number
//
// All of it but the arena is private memory off the Go heap, guarded by one lock that is held for
// at most a few hundred keys at a time, or for those of a slab that is taken.
package dram

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
	"github.com/kvagent/kvagent/pool/dram/offheap"
)

// Limits of a pool, bytes.
const (
	MaxBytes = 2 << 40 // slots have 31-bit numbers of 1 KiB
	MinBytes = 64 << 10
	// MinSlabBytes is the least Options.SlabBytes.
	MinSlabBytes = 4 << 10
)

// HugePages is whether an arena may lie on huge pages.
type HugePages uint8

// Auto uses huge pages if enough are free; Off never does.
const (
	Auto HugePages = iota
	Off
)

// Options of a pool.
type Options struct {
	Bytes int64 // size of the arena, MinBytes to MaxBytes; rounded down to whole slabs
	// SlabBytes is a power of two, at least the largest shard; 0: 64 or more slabs of 1 to 64 MiB.
	SlabBytes int64
	HugePages HugePages
	// Nodes are the preferred NUMA nodes, 0 to 1023, of the arena's pages, interleaved if there are
	// several: those of the GPUs that copy from it. Empty: no preference.
	Nodes []int
	// Virtual makes an arena that is only address space: it is not populated, has no descriptor,
	// and memory for it is not reserved. It is for measuring the index without the data.
	Virtual bool
	// Advisor chooses the entries to evict; nil is least recently used. The pool closes it.
	Advisor pool.Advisor
	Clock   func() time.Time // nil is time.Now
	// Path names a file on tmpfs or hugetlbfs in which the pool outlives its process; empty: it
	// does not. An existing pool file is used again if its sizes are the same. HugePages is ignored
	// then: the file system determines the pages.
	Path string
	// Abandon makes a new file in the place of one that a process has whose agent has ended.
	Abandon bool
	// BadPage is called for each page of the arena that is retired because it cannot be read,
	// without any lock held. It may be nil.
	BadPage func(BadPage)
	// SpaceNotKept is called when a space is opened that the file has no record of: it is too large
	// for one (many shards in many groups), or no record is free. Its entries end with the process.
	// No lock is held. It may be nil.
	SpaceNotKept func(pool.Fingerprint)
	// Left is told of each entry that leaves, under a lock. It retains no argument, and may be nil.
	Left func(*pool.Departure)
	// HashSeed is 0 for a secret of this process, which a hostile engine cannot guess. Reproducible
	// measurements set another number.
	HashSeed uint64
}

// Info is what became of the options.
type Info struct {
	Bytes, SlabBytes int64
	PageBytes        int64     // of the arena: 2 MiB or 4 KiB
	PageReason       string    // why reserved huge pages are not used, for the log; empty if they are
	Placement        string    // how far Nodes were used; empty: there were none
	Recovery         *Recovery // outcome of reading the file; nil without one
}

// Pool implements pool.Memory. All methods may run concurrently.
type Pool struct {
	info  Info
	arena *arena.Arena
	base  []byte // of the arena
	fd    int    // of the arena; -1: address space only

	advisor   pool.Advisor // nil: none
	keeper    *fileKeeper
	onBadPage func(BadPage)
	onNotKept func(pool.Fingerprint)

	sweeping sync.Mutex // held by a sweep; taken before mu

	mu     sync.Mutex // guards core and closed; no byte of the arena is accessed under it
	core   *core
	closed bool
}

var _ pool.Memory = (*Pool)(nil)

// Open makes an empty pool. It refuses one that is larger than the machine's memory, and returns at
// once: the arena is populated in the background and may be used before that.
func Open(o Options) (*Pool, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	if o.Path != "" {
		return openFile(&o)
	}
	a, err := o.arena()
	if err != nil {
		return nil, err
	}
	page, _ := a.Page()
	c, err := newCore(&o, page, offheap.NewSeed(o.HashSeed), nil)
	if err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return start(&o, a, c), nil
}

// arena maps the memory of a pool that ends with its process.
func (o *Options) arena() (*arena.Arena, error) {
	if o.Virtual {
		return arena.Virtual(o.Bytes)
	}
	return arena.Open(o.Bytes, o.HugePages == Auto)
}

func start(o *Options, a *arena.Arena, c *core) *Pool {
	p := &Pool{arena: a, core: c, advisor: c.advisor, onBadPage: o.BadPage, onNotKept: o.SpaceNotKept}
	p.base, p.fd = a.Memory()
	p.info = Info{Bytes: o.Bytes, SlabBytes: o.SlabBytes}
	p.info.PageBytes, p.info.PageReason = a.Page()
	if !o.Virtual {
		p.info.Placement = a.Place(o.Nodes)
		if o.HugePages == Auto {
			a.MakeHuge()
		}
		a.Populate(p.probe)
	}
	return p
}

// complete checks the options and sets the defaults.
func (o *Options) complete() error {
	if o.Bytes < MinBytes || o.Bytes > MaxBytes {
		return fmt.Errorf("dram: Bytes is %d, must be %d to %d", o.Bytes, int64(MinBytes), int64(MaxBytes))
	}
	if o.SlabBytes == 0 {
		o.SlabBytes = slabFor(o.Bytes)
	}
	o.Bytes = o.Bytes &^ (o.SlabBytes - 1)
	if o.Clock == nil {
		o.Clock = time.Now
	}
	return nil
}

// slabFor returns a slab size of which at least 64 fit, but 1 MiB at least, 64 MiB at most, and
// never more than the pool.
func slabFor(bytes int64) int64 {
	s := int64(64 << 20)
	for s > 1<<20 && s*64 > bytes {
		s >>= 1
	}
	for s > bytes {
		s >>= 1
	}
	return s
}

// Info returns what became of the options.
func (p *Pool) Info() Info { return p.info }

// Arena returns the memory that the slots lie in, and the descriptor from which it can be mapped
// (-1 for a virtual one). Both are the pool's and end with Close.
func (p *Pool) Arena() (base []byte, fd int) { return p.base, p.fd }

// Populated waits until the arena is populated or the pool is closed, and returns why it was not
// populated to the end. An arena that is not populated is slower at first, and fails late if the
// machine has no memory.
func (p *Pool) Populated() error { return p.arena.Populated() }

// Close frees all memory, the arena too. Methods called later find nothing.
func (p *Pool) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return pool.ErrClosed
	}
	p.closed = true
	err := p.core.close()
	p.mu.Unlock()
	p.arena.StopPopulating()
	if p.advisor != nil {
		p.advisor.Close()
	}
	return errors.Join(err, p.arena.Close(), p.keeper.close())
}

// Package keep is the ledger of what single requests asked the pool's memory to do with their
// blocks: to keep some for a time, within a budget, and to drop others after a time unless
// something uses them.
package keep

import (
	"container/heap"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Limits of a ledger. A wish beyond them is refused and counted.
const (
	MaxPinned = 1 << 18        // blocks
	MaxBrief  = 1 << 18        // blocks that wait to be dropped
	MaxTime   = 24 * time.Hour // of a request
)

// Memory is the pool as a ledger uses it.
type Memory interface {
	pool.Keeper
	Unpin(refs []pool.Ref)
	Epoch(s pool.SpaceID) uint32
}

// Request asks for blocks to be kept, dropped, or both. A time of 0 asks for nothing; the ledger
// retains nothing of the request.
type Request struct {
	Space  pool.SpaceID
	Group  uint8
	Hashes pool.Hashes
	Pin    time.Duration // how long those that are stored are kept
	TTL    time.Duration // after which they are dropped, unless they were used; never before Pin
}

// Report is the state and the counters of a ledger.
type Report struct {
	Blocks int   `json:"blocks"` // kept
	Bytes  int64 `json:"bytes" metric:"kept_bytes"`
	Budget int64 `json:"bytes_limit"`
	Brief  int   `json:"brief_blocks"` // waiting to be dropped, used since or not

	Refused uint64 `json:"refused" metric:"keeps_refused_total"` // not kept or not marked: over a limit
	Dropped uint64 `json:"brief_dropped"`                        // at the end of their time
}

// Ledger pins blocks until their time is over. A block is pinned once, for the longest time that a
// request asked for. Expire has to be called from time to time.
type Ledger struct {
	memory Memory
	budget int64 // bytes that may be pinned
	now    func() time.Time

	mu      sync.Mutex // taken before the pool's locks
	pinned  map[pool.Ref]pin
	bytes   int64
	serial  uint64
	brief   briefs
	waiting int // blocks in brief
	refused uint64
	dropped uint64
}

type pin struct {
	space  pool.SpaceID
	epoch  uint32
	bytes  int64
	serial uint64 // in the order of chains
	until  time.Time
}

// brief is blocks that are dropped at a time, unless they were used.
type brief struct {
	space  pool.SpaceID
	epoch  uint32
	group  uint8
	hashes pool.Hashes // owned
	at     time.Time
}

// New makes an empty ledger that pins at most budget bytes.
func New(m Memory, budget int64, now func() time.Time) *Ledger {
	return &Ledger{memory: m, budget: budget, now: now, pinned: make(map[pool.Ref]pin)}
}

// Keep serves a request. Blocks that are not in memory are ignored.
func (l *Ledger) Keep(r *Request) {
	now := l.now()
	if r.Pin > 0 {
		l.pin(r, now.Add(min(r.Pin, MaxTime)))
	}
	if r.TTL > 0 {
		l.limit(r, now.Add(min(max(r.TTL, r.Pin), MaxTime)))
	}
}

func (l *Ledger) pin(r *Request, until time.Time) {
	l.mu.Lock()
	epoch := l.memory.Epoch(r.Space)
	refs, bytes := l.memory.PinEach(r.Space, r.Group, r.Hashes, nil)
	surplus := refs[:0]
	for _, ref := range refs {
		old, again := l.pinned[ref]
		switch {
		case again:
			if until.After(old.until) {
				old.until = until
				l.pinned[ref] = old
			}
			surplus = append(surplus, ref)
		case l.bytes+bytes > l.budget || len(l.pinned) == MaxPinned:
			l.refused++
			surplus = append(surplus, ref)
		default:
			l.serial++
			l.pinned[ref] = pin{space: r.Space, epoch: epoch, bytes: bytes, serial: l.serial, until: until}
			l.bytes += bytes
		}
	}
	l.mu.Unlock()
	l.memory.Unpin(surplus)
}

func (l *Ledger) limit(r *Request, at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.waiting+r.Hashes.N > MaxBrief {
		l.refused += uint64(r.Hashes.N)
		return
	}
	blob := make([]byte, 0, r.Hashes.N*r.Hashes.Len)
	for i := range r.Hashes.N {
		blob = append(blob, r.Hashes.At(i)...)
	}
	b := brief{space: r.Space, epoch: l.memory.Epoch(r.Space), group: r.Group, at: at}
	b.hashes = pool.Chain(blob, r.Hashes.Len)
	l.memory.MarkBrief(b.space, b.group, b.hashes)
	heap.Push(&l.brief, b)
	l.waiting += b.hashes.N
}

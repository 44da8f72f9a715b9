package evictsim

import (
	"cmp"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/advisor"
)

// BlockTokens is the number of tokens of a block of a stream, as in Mooncake's traces.
const BlockTokens = 512

// Result is the result of a run.
type Result struct {
	Blocks, Hits int
	Stuck        int // requests that fit, of which the policy found no victim for a block, nor refused it
	// Laps are the processor time in the policy, the index and the chains of the driver.
	Laps [laps]time.Duration
}

// HitRate returns hits per block looked up.
func (r Result) HitRate() float64 { return float64(r.Hits) / float64(max(1, r.Blocks)) }

// laps is the number of equal parts of a stream that are timed.
const laps = 128

// Least returns the shorter time of each lap: in another run, other work of the machine disturbs
// other laps.
func (r Result) Least(other Result) Result {
	for i, d := range other.Laps {
		r.Laps[i] = min(r.Laps[i], d)
	}
	return r
}

// PerAccess returns the time of all laps per block looked up.
func (r Result) PerAccess() time.Duration {
	sum := time.Duration(0)
	for _, d := range r.Laps {
		sum += d
	}
	return sum / time.Duration(max(1, r.Blocks))
}

// Run plays a stream against a policy with room for capacity blocks. A block hits if it and all
// before it in its request are stored; the others are stored afterwards.
func Run(s *Stream, p advisor.Policy, capacity int) Result {
	d := newDriver(s, p, capacity)
	n := len(s.Requests)
	runtime.LockOSThread() // its time is measured
	defer runtime.UnlockOSThread()
	for lap := range laps {
		start := processorTime()
		for i := lap * n / laps; i < (lap+1)*n/laps; i++ {
			d.request(&s.Requests[i])
		}
		d.result.Laps[lap] = processorTime() - start
	}
	return d.result
}

// processorTime returns the processor time of the thread so far, which excludes other work of the
// machine.
func processorTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err) // the kernel has this clock since 2.6
	}
	return time.Duration(t.Nano())
}

// driver plays the pool: it has the index and the chains.
type driver struct {
	stream   *Stream
	policy   advisor.Policy
	seed     uint64 // of prints
	capacity int
	entry    []uint32 // by block; 0 is not stored
	slots    []slot   // by entry; slot 0 is none
	free     []uint32
	keep     uint32 // entry that must stay: it is about to get a child
	told     int    // of the stream, so many so far
	result   Result

	use     pool.Use
	in      pool.Insertion
	removed [1]uint32
	advice  pool.Advice
}

// slot is an entry with its place in the tree of chains.
type slot struct {
	block               uint32
	child, next, before uint32 // before: sibling or, of the first child, the parent
	parent              uint32
}

func newDriver(s *Stream, p advisor.Policy, capacity int) *driver {
	d := &driver{
		stream: s, policy: p, seed: s.HashSeed, capacity: capacity, entry: make([]uint32, s.Blocks),
		slots: make([]slot, capacity+1),
	}
	for e := capacity; e > 0; e-- {
		d.free = append(d.free, uint32(e))
	}
	tokens := cmp.Or(s.BlockTokens, BlockTokens)
	d.use.BlockTokens, d.in.BlockTokens = tokens, tokens
	return d
}

// Child implements pool.View.
func (d *driver) Child(e uint32) uint32 { return d.slots[e].child }

// Held implements pool.View.
func (d *driver) Held(e uint32) bool { return e == d.keep }

// print spreads the number of a block over a word, like the hash of a key.
func print(block uint32, seed uint64) uint64 {
	x := uint64(block) + 0x9e3779b97f4a7c15*(1+2*seed)
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func (d *driver) request(r *Request) {
	for ; d.told < len(d.stream.Told) && d.stream.Told[d.told].Millis <= r.Millis; d.told++ {
		d.tell(&d.stream.Told[d.told])
	}
	n := 0
	d.use.Now, d.use.Entries, d.use.Prints = r.Millis*1e6, d.use.Entries[:0], d.use.Prints[:0]
	for n < len(r.Blocks) && d.entry[r.Blocks[n]] != 0 {
		d.use.Entries = append(d.use.Entries, d.entry[r.Blocks[n]])
		n++
	}
	for _, b := range r.Blocks {
		d.use.Prints = append(d.use.Prints, print(b, d.seed))
	}
	d.result.Blocks += len(r.Blocks)
	d.result.Hits += n
	d.policy.Access(&d.use)
	d.store(r.Blocks, n, r.Millis*1e6)
}

// tell passes on what is told of a request.
func (d *driver) tell(t *Told) {
	a := &d.advice
	a.Now, a.Finish, a.Output, a.Priority, a.Until = t.Millis*1e6, t.Finish, t.Output, t.Priority, t.Until*1e6
	a.Prints, a.Entries = a.Prints[:0], a.Entries[:0]
	for _, b := range d.stream.Requests[t.Request].Blocks {
		a.Prints, a.Entries = append(a.Prints, print(b, d.seed)), append(a.Entries, d.entry[b])
	}
	d.policy.Advise(a)
}

// store stores the blocks from n on, as far as there is room.
func (d *driver) store(blocks []uint32, n int, now int64) {
	if n > 0 {
		d.keep = d.entry[blocks[n-1]]
	}
	parent := d.keep
	d.in.Parent = parent
	d.in.Now, d.in.Entries, d.in.Prints = now, d.in.Entries[:0], d.in.Prints[:0]
	for i, b := range blocks[n:] {
		e := d.room(now, d.use.Prints[n+i])
		if e == 0 {
			break
		}
		d.entry[b], d.slots[e] = e, slot{block: b}
		d.hang(e, parent)
		parent = e
		d.in.Entries, d.in.Prints = append(d.in.Entries, e), append(d.in.Prints, d.use.Prints[n+i])
	}
	d.keep = 0
	d.policy.Insert(&d.in)
}

// room returns a free entry, by eviction if necessary; 0 if nothing can be evicted.
func (d *driver) room(now int64, print uint64) uint32 {
	if len(d.free) == 0 {
		e := d.policy.Victim(now, 1, print, d)
		if e == 0 || e == pool.Refused {
			if e == 0 && len(d.use.Prints) <= d.capacity {
				d.result.Stuck++
			}
			return 0
		}
		d.evict(e)
	}
	e := d.free[len(d.free)-1]
	d.free = d.free[:len(d.free)-1]
	return e
}

func (d *driver) evict(e uint32) {
	x := &d.slots[e]
	if x.child != 0 {
		panic("evictsim: hole in a chain: the victim has a stored child")
	}
	if e == d.keep {
		panic("evictsim: the victim is held")
	}
	d.entry[x.block] = 0
	d.unhang(e)
	d.removed[0] = e
	d.policy.Remove(d.removed[:])
	d.free = append(d.free, e)
}

func (d *driver) hang(e, parent uint32) {
	if parent == 0 {
		return
	}
	first := d.slots[parent].child
	d.slots[e].parent, d.slots[e].next = parent, first
	if first != 0 {
		d.slots[first].before = e
	}
	d.slots[parent].child = e
}

func (d *driver) unhang(e uint32) {
	x := &d.slots[e]
	if x.next != 0 {
		d.slots[x.next].before = x.before
	}
	switch {
	case x.before != 0:
		d.slots[x.before].next = x.next
	case x.parent != 0:
		d.slots[x.parent].child = x.next
	}
}

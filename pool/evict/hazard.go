// Package evict chooses the entries that a pool evicts: LRU, and Hazard, which learns how likely
// blocks of a class are used again at an age, and keeps those with the most expected hits per time
// kept. The policies are pure: no lock, no clock, no goroutine. docs/decisions has the figures.
package evict

import (
	"unsafe"

	"github.com/kvagent/kvagent/pool"
)

// Hazard learns hazards: for a class of blocks and a bin of age, the share of the blocks reaching
// that age that are used again within the bin. The worth of an entry is the greatest expected rate
// of hits per second from its age on. Hazard evicts the oldest entry of the cell (class and bin)
// with the least worth.
//
// The work during a request is proportional to its blocks, never to the number of entries.
type Hazard struct {
	nodes      nodes
	kinds      []*kind // nil where there was no entry yet
	entries    int
	clock      clock
	ghosts     ghosts
	awaited    awaited
	tables     tables
	scorer     scorer
	worths     [numClasses]worths
	turn       turn // of ageing
	lost       int  // blocks that LRU would have and the pool evicted
	judge      judge
	missBudget missBudget
	victim     uint32 // last result of Victim
	passing    passing
	last       putLast // of one Insert
	missing    uint64  // print of the first block that the last look-up did not find
	recent     recent
	descent    descent
	misses     []ghostRef // scratch of one look-up
}

// NewHazard returns a policy that has learned nothing and behaves about like LRU.
func NewHazard() *Hazard {
	h := &Hazard{}
	h.tables.weight = 1
	h.ghosts.grow(0, 0)
	h.awaited.grow(0, 0)
	h.startRound()
	for c := range numClasses {
		h.scoreClass(c)
	}
	return h
}

// Insert implements pool.Policy. A block that was looked up before has the class that it got then.
func (h *Hazard) Insert(in *pool.Insertion) {
	if len(in.Entries) == 0 {
		return
	}
	now := h.clock.advance(in.Now)
	k := h.kind(in.Kind, now)
	h.restartIdle(k, now)
	used, step := now, k.recency.step(len(in.Entries))
	if at, ok := h.useOfParent(k, in); ok {
		used = at
	} else {
		if steps := (len(in.Entries) - 1) / step; steps > 0 && in.Prints[0] != h.missing {
			// The end of this chain is newer than the start of any other.
			now = h.clock.atLeast(k.recency.last + 1 + uint32(steps))
			used = now
		}
		h.missing = 0
		k.recency.open(len(in.Entries), step, now)
	}
	var last *putLast
	if len(in.Entries) > fewPut {
		last = &h.last
		*last = putLast{}
	}
	t := traits(len(in.Entries), 0, in.BlockTokens, 0)
	for i := len(in.Entries) - 1; i >= 0; i-- {
		e, print := in.Entries[i], in.Prints[i]
		n := h.nodes.make(e)
		if n.state&statePresent != 0 {
			continue
		}
		n.print, n.kind, n.state, n.passed = print, in.Kind, statePresent, 0
		class := h.classOnInsert(print, now, &t, i)
		at := used - uint32(i/step)
		if before(at, k.recency.opened) {
			at = k.recency.opened
		}
		at = k.recency.notBefore(at)
		k.recency.add(k.put(&h.nodes, &h.worths, e, n, class, at, last))
		h.entries++
		k.entries++
	}
	k.recency.grain = max(1, k.entries/grains)
	h.trim(k, k.entries)
	h.ghosts.grow(min(h.entries*ghostsAnItem, maxGhosts), growth(len(in.Entries)))
	h.awaited.grow(min(h.entries, maxAwaited), growth(len(in.Entries)))
}

// useOfParent returns the use of the block before the stored ones, if it belongs to the chain
// looked up last. Blocks stored later, such as those that an engine generated since, are used now.
func (h *Hazard) useOfParent(k *kind, in *pool.Insertion) (used uint32, ok bool) {
	n := h.nodes.find(in.Parent)
	if n == nil || n.kind != in.Kind {
		return 0, false
	}
	used = h.nodes.runOf(n).used
	return used, !before(used, k.recency.opened)
}

// growth returns by how many sets the tables may grow when so many entries are inserted.
func growth(entries int) int { return 1 + entries }

// classOnInsert returns the class of a block that is stored, from its ghost if it has one.
func (h *Hazard) classOnInsert(print uint64, now uint32, t *chainTraits, i int) uint16 {
	if class, ok := h.awaited.take(print); ok {
		h.tables.enter(class, -1, 0, 1)
		return class
	}
	var uses uint8
	if s, w := h.ghosts.find(print); w >= 0 {
		info, used := s.info[w], s.way[w].used
		if h.inLRU(s, w) {
			r := &h.kinds[s.kind[w]].recency
			if info&ghostPaid == 0 {
				h.found(r, used)
			}
			r.remove(used)
			k := h.kinds[s.kind[w]]
			k.spare = max(0, k.spare-1)
		}
		h.ghosts.take(s, w)
		if info.awaited() {
			return info.class()
		}
		b := max(info.bin(), binOf(now-used))
		h.tables.enter(info.class(), info.bin(), b, 1)
		h.tables.use(info.class(), b)
		uses = min(info.uses()+1, maxUses)
	}
	class := t.class(i, uses)
	h.tables.enter(class, -1, 0, 1)
	return class
}

// Remove implements pool.Policy. Removed entries are remembered as ghosts. LRU may still have an
// entry that this policy chose; it loses any other.
func (h *Hazard) Remove(entries []uint32) {
	for _, e := range entries {
		n := h.nodes.find(e)
		if n == nil {
			continue
		}
		k, r := h.kinds[n.kind], h.nodes.runOf(n)
		class, used := r.class, r.used
		info := makeInfo(class, int(r.bin))
		switch {
		case r.half == old || !k.recency.has(used):
		case e == h.victim:
			info |= ghostRecent
			k.recency.lose(used, 1)
			h.lost++
		default:
			k.recency.remove(used)
		}
		if e == h.victim {
			h.victim = 0
		}
		k.take(&h.nodes, &h.worths, n)
		k.removed[class]++
		h.ghosts.putLate(n.print, used, info, n.kind)
		if n.state&stateDescent != 0 {
			h.leaveDescent(e)
		}
		h.entries--
		k.entries--
		n.state = 0
	}
}

// Class implements pool.Policy: classes that differ only in their gap have one name, as in Report.
func (h *Hazard) Class(e uint32) string {
	n := h.nodes.find(e)
	if n == nil {
		return ""
	}
	return useNames[int(h.nodes.runOf(n).class)/gaps]
}

// Report implements pool.Policy.
func (h *Hazard) Report() pool.PolicyReport {
	j := &h.judge
	r := pool.PolicyReport{
		Name: "hazard", Entries: h.entries, Ghosts: h.ghosts.count, Bytes: h.bytes(),
		Lookups: j.lookups, Hits: j.hits, ShadowHits: j.lru, Alarms: j.alarms,
		Missing: h.lost, MayMiss: max(0, h.mayMiss()),
		Fallback: j.harm,
		Classes:  make([]pool.PolicyClass, kindsOfUse),
	}
	for c := range r.Classes {
		r.Classes[c] = h.reportUse(c)
	}
	return r
}

// reportUse describes the classes of all gaps together. Their worth is that of the mean entry.
func (h *Hazard) reportUse(use int) pool.PolicyClass {
	const hour = 3600
	pc := pool.PolicyClass{Name: useNames[use]}
	next, worth := inf, 0.
	for c := use * gaps; c < (use+1)*gaps; c++ {
		held := 0
		for _, k := range h.kinds {
			if k == nil {
				continue
			}
			pc.Evicted += k.removed[c]
			for i := range k.half {
				held += int(k.half[i].held[c])
				next = min(next, k.half[i].worst[c])
			}
		}
		pc.Entries += held
		worth += float64(held) * float64(h.worths[c][0])
	}
	if pc.Entries == 0 {
		pc.Worth = float64(h.worths[use*gaps][0]) * hour
	} else {
		pc.Worth = worth / float64(pc.Entries) * hour
	}
	if next < inf {
		pc.WorthNext = float64(next) * hour
	}
	return pc
}

func (h *Hazard) bytes() int64 {
	n := h.nodes.bytes() + h.nodes.runs.bytes() + h.ghosts.bytes() + h.awaited.bytes() + int64(unsafe.Sizeof(*h))
	for _, k := range h.kinds {
		if k != nil {
			n += int64(unsafe.Sizeof(*k))
		}
	}
	return n
}

// Advise implements pool.Policy.
func (h *Hazard) Advise(*pool.Advice) {}

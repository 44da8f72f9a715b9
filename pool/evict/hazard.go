// Package evict says which entry of a pool goes when room is needed: LRU, and Hazard, which learns from what it
// sees how likely blocks of a class are to be used again at an age, and keeps those that give most hits for the
// time they are kept. The policies are pure: no lock, no clock, no goroutine. See docs/decisions for the figures.
package evict

import "github.com/kvagent/kvagent/pool"

// Hazard learns hazards: for a class of blocks and a bin of age, the share of those that reach the age that are
// used again before the next. The worth of an entry is the most hits per second it can be expected to give from its
// age on. What goes is the oldest entry of the cell of class and bin that is worth least.
//
// On the way of a request it does work in proportion to the blocks of the request, never to the entries.
type Hazard struct {
	nodes   nodes
	kinds   []*kind // nil where there was no entry yet
	entries int
	clock   clock
	ghosts  ghosts
	awaited awaited
	tables  tables
	scorer  scorer
	worths  [numClasses]worths
	turn    struct{ kind, class, owed int } // of ageing
	lost    lost
	spare   spare
	judge   judge
	humble  humble
	credit  credit
	victim  uint32 // that Victim named last
	recent  recent
	way     way
	behind  []ghostRef // scratch of one look-up
	missed  missed
}

// NewHazard has learned nothing yet: it is about LRU.
func NewHazard() *Hazard {
	h := &Hazard{}
	h.tables.weight = 1
	h.ghosts.grow(0)
	h.awaited.grow(0)
	h.judge.margin = marginStart
	h.humble.forgive()
	h.startRound()
	for c := range numClasses {
		h.scoreClass(c)
	}
	return h
}

// Insert implements pool.Policy. A block that was looked up before has the class it got then.
func (h *Hazard) Insert(in *pool.Insertion) {
	now := h.clock.hear(in.Now)
	k := h.kind(in.Kind)
	h.follow(k, in)
	t := traits(len(in.Entries), 0, in.BlockTokens, 0)
	for i := len(in.Entries) - 1; i >= 0; i-- {
		e := in.Entries[i]
		if n := h.nodes.at(e); n.state&stateFresh != 0 {
			n.state &^= stateFresh
			k.young.put(&h.nodes, &h.worths, e, n, h.comeBack(n.print, now, &t, i), now)
		}
	}
	h.ghosts.grow(min(h.entries*ghostsAnItem, maxGhosts))
	h.awaited.grow(min(h.entries, maxAwaited))
}

// follow takes entries into LRU, below those before them in their chain: those were used later.
func (h *Hazard) follow(k *kind, in *pool.Insertion) {
	above := in.Parent
	for i, e := range in.Entries {
		n := h.nodes.make(e)
		if n.state&stateKnown == 0 {
			*n = node{print: in.Prints[i], kind: in.Kind, state: stateKnown | stateFresh}
			h.entries++
			k.entries++
			h.enterLRU(k, above, e, n)
		}
		above = e
	}
}

// comeBack is the class of a block that is stored, from its ghost if there is one.
func (h *Hazard) comeBack(print uint64, now uint32, t *chainTraits, i int) uint8 {
	if class, ok := h.awaited.take(print); ok {
		h.tables.enter(class, -1, 0, 1)
		return class
	}
	var uses uint8
	if s, w := h.ghosts.find(print); w >= 0 {
		info := s.info[w]
		h.ghosts.take(s, w)
		if info.awaited() {
			return info.class()
		}
		b := max(info.bin(), binOf(now-s.way[w].used))
		h.tables.enter(info.class(), info.bin(), b, 1)
		h.tables.use(info.class(), b)
		uses = min(info.uses()+1, maxUses)
	}
	class := t.class(i, uses)
	h.tables.enter(class, -1, 0, 1)
	return class
}

// Remove implements pool.Policy. What goes is remembered as a ghost.
func (h *Hazard) Remove(entries []uint32) {
	for _, e := range entries {
		n := h.nodes.known(e)
		if n == nil {
			continue
		}
		k, r := h.kinds[n.kind], h.nodes.runOf(n)
		class, bin, used := r.class, int(r.bin), r.used
		k.cells(n).take(&h.nodes, &h.worths, e, n)
		k.gone[class]++
		h.ghosts.putLate(n.print, used, makeInfo(class, bin))
		if n.state&stateOnWay != 0 {
			h.offWay(e)
		}
		h.entries--
		k.entries--
		h.leaveLRU(k, e, n, used)
		n.state = 0
	}
}

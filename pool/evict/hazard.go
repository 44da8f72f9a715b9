// Package evict chooses the entries that a pool evicts: LRU, and Hazard, which learns how likely
// blocks of a class are used again at an age, and keeps those most likely used soon. The policies
// are pure: no lock, no clock, no goroutine. docs/decisions has the figures.
package evict

import (
	"unsafe"

	"github.com/kvagent/kvagent/pool"
)

// Hazard learns hazards: for a class of blocks and a bin of age, the share of the blocks reaching
// that age that are used again within the bin. The worth of an entry is the chance of a use soon,
// which follows from the hazards of its class from its age on. Hazard evicts the entry with the
// least worth among those of each class used least recently, and refuses a block worth less.
//
// The work during a request is proportional to its blocks, never to the number of entries.
type Hazard struct {
	nodes   pages[node]
	runs    runs
	kinds   []*kind // nil where there was no entry yet
	entries int
	clock   clock
	ghosts  ghosts
	tables  tables
	scorer  scorer
	worths  [numClasses]worths
	turn    turn

	seen                          int     // look-ups
	lookups, hits, refused, saved uint64  // blocks
	going                         float32 // worth without their wishes of the entries that went lately
}

// turn is where the next look-up continues to age runs, ghosts and classes.
type turn struct {
	run, set uint32
	class    uint16
}

const (
	maxGap     = 4    // the longest gap of unknown blocks in a chain that still counts as known
	askedAgain = 5000 // ms within which the same chain is taken for the same request: schedulers repeat it
	never      = 1<<32 - 1

	ghostsABlock  = 4 // that age per block looked up
	runsABlock    = 4
	meanGoing     = 1024 // entries over which the worth of those that go is averaged
	classesABlock = 8    // whose least worth is found again
)

// NewHazard returns a policy that has learned nothing and behaves about like LRU.
func NewHazard() *Hazard {
	h := &Hazard{}
	h.tables.weight = 1
	h.ghosts.grow(0, 0)
	h.scoreAll()
	return h
}

func (h *Hazard) scoreAll() {
	h.startRound()
	for c := range numClasses {
		h.scoreClass(c)
	}
}

// Access implements advisor.Policy. A repeated look-up of a recent chain counts as the same
// request, and nothing is learned from it.
func (h *Hazard) Access(u *pool.Use) {
	length := len(u.Prints)
	if length == 0 {
		return
	}
	now := h.clock.advanceBy(u)
	h.lookups += uint64(length)
	h.hits += uint64(len(u.Entries))
	repeated := h.sinceUse(u, length-1, now) < askedAgain
	known, gap := h.known(u, now)
	t := traits(length, known, u.BlockTokens, gap)
	for i := length - 1; i >= len(u.Entries); i-- {
		h.miss(u.Prints[i], i, known, &t, now, repeated)
	}
	for i := len(u.Entries) - 1; i >= 0; i-- {
		n := h.match(u.Entries[i], u.Prints[i])
		if n == nil {
			continue
		}
		r := h.runs.at(n.run)
		if r.class >= firstWished && h.unwished(r, now) < h.going {
			h.saved++
		}
		h.move(u.Entries[i], n, h.use(r.state, i, &t, now, repeated))
	}
	if !repeated {
		h.seen++
		h.scorer.note(length, now)
		h.tables.fade()
		h.age(now, length)
		h.score(length)
	}
}

// unwished returns what entries would be worth without their wish.
func (h *Hazard) unwished(r *run, now uint32) float32 { return h.worths[r.base][binOf(now-r.used)] }

// sinceUse returns the ms since block i of a chain was used; never if it is not known.
func (h *Hazard) sinceUse(u *pool.Use, i int, now uint32) uint32 {
	if i < len(u.Entries) {
		if n := h.match(u.Entries[i], u.Prints[i]); n != nil {
			return now - h.runs.at(n.run).used
		}
	} else if g := h.ghosts.find(u.Prints[i]); g != nil {
		return now - g.used
	}
	return never
}

// known returns the number of leading blocks that are stored or remembered, but for gaps, and the
// class of the time since the deepest was used.
func (h *Hazard) known(u *pool.Use, now uint32) (known int, gap uint16) {
	known = len(u.Entries)
	for i := max(0, known-1); i < min(len(u.Prints), known+maxGap); i++ {
		if ago := h.sinceUse(u, i, now); ago != never {
			known, gap = max(known, i+1), gapOf(ago)
		}
	}
	return known, gap
}

// use returns the state of block i of a chain after a use now. It counts the use unless it is a
// repeated one.
func (h *Hazard) use(s state, i int, t *chainTraits, now uint32, repeated bool) state {
	if repeated {
		s.used, s.bin = now, 0
		return s
	}
	h.pass(&s, now, 1)
	h.tables.use(s.class, int(s.bin))
	if s.base != s.class {
		h.tables.use(s.base, int(s.bin))
	}
	return h.enter(t.class(i, again(s.base)), now)
}

// enter counts a block that is of a class from now on, and returns its state.
func (h *Hazard) enter(class uint16, now uint32) state {
	h.tables.enter(class, -1, 0, 1)
	return state{used: now, class: class, base: class}
}

// pass moves n blocks into the bin of their age now, and counts them at risk there.
func (h *Hazard) pass(s *state, now uint32, n int32) {
	b := max(int(s.bin), binOf(now-s.used))
	h.tables.enter(s.class, int(s.bin), b, n)
	if s.base != s.class {
		h.tables.enter(s.base, int(s.bin), b, n)
	}
	s.bin = uint8(b)
}

// miss records the class that a missing block has when it is stored.
func (h *Hazard) miss(print uint64, i, known int, t *chainTraits, now uint32, repeated bool) {
	g := h.ghosts.find(print)
	if g == nil {
		uses := uint16(0)
		if i < known {
			uses = 1 // it was forgotten, but blocks after it were not
		}
		h.ghosts.put(ghostOf(print, h.enter(t.class(i, uses), now)))
		return
	}
	g.set(h.use(g.state(), i, t, now, repeated))
}

// age moves some runs and ghosts into the bins of their age, counts them at risk there, and finds
// the least worth of some classes again.
func (h *Hazard) age(now uint32, blocks int) {
	for range min(blocks*runsABlock, int(h.runs.made)) {
		if h.turn.run++; h.turn.run > h.runs.made {
			h.turn.run = 1
		}
		if r := h.runs.at(h.turn.run); r.count > 0 {
			h.pass(&r.state, now, int32(r.count))
		}
	}
	for range min(blocks*ghostsABlock/ways+1, int(h.ghosts.sets)) {
		if h.turn.set++; h.turn.set >= uint32(h.ghosts.sets) {
			h.turn.set = 0
		}
		s := h.ghosts.at(h.turn.set)
		for i := range s {
			if g := &s[i]; g.there {
				s := g.state()
				h.pass(&s, now, 1)
				g.bin = s.bin
			}
		}
	}
	for range min(blocks*classesABlock, numClasses) {
		if h.turn.class++; h.turn.class == numClasses {
			h.turn.class = 0
		}
		for _, k := range h.kinds {
			if k != nil && k.lists[h.turn.class].oldest != 0 {
				h.settle(k, h.turn.class)
			}
		}
	}
}

// Insert implements advisor.Policy. A block that was looked up or advised on before has the class
// that it got then.
func (h *Hazard) Insert(in *pool.Insertion) {
	if len(in.Entries) == 0 {
		return
	}
	now := h.clock.advance(in.Now)
	if h.ghosts.find(in.Prints[0]) == nil {
		now = h.clock.tick() // so that it is newer than what was stored before
	}
	for len(h.kinds) <= int(in.Kind) {
		h.kinds = append(h.kinds, nil)
	}
	if h.kinds[in.Kind] == nil {
		h.kinds[in.Kind] = newKind()
	}
	t := traits(len(in.Entries), 0, in.BlockTokens, 0)
	for i := len(in.Entries) - 1; i >= 0; i-- {
		e := in.Entries[i]
		n := h.nodes.make(e)
		if n.run != 0 {
			continue
		}
		n.print = in.Prints[i]
		if g := h.ghosts.find(n.print); g != nil {
			h.put(e, n, in.Kind, g.class, g.state())
			h.ghosts.take(g)
		} else {
			s := h.enter(t.class(i, 0), now)
			h.put(e, n, in.Kind, s.class, s)
		}
		h.entries++
	}
	h.ghosts.grow(min(h.entries*ghostsAnItem, maxGhosts), 1+len(in.Entries))
}

// Remove implements advisor.Policy. Removed entries are remembered as ghosts.
func (h *Hazard) Remove(entries []uint32) {
	for _, e := range entries {
		n := h.find(e)
		if n == nil {
			continue
		}
		r := h.runs.at(n.run)
		h.kinds[r.kind].removed[r.class]++
		h.going += (h.unwished(r, uint32(h.clock.now)) - h.going) / meanGoing
		if h.ghosts.find(n.print) == nil {
			h.ghosts.put(ghostOf(n.print, r.state))
		}
		h.take(e, n)
		h.entries--
	}
}

// Advise implements advisor.Policy. The age of the blocks begins anew, so that it is the time since
// the end of the request. What is told of blocks that are neither stored nor remembered is lost, as
// are most wishes while they tell nothing: the others show when they do.
func (h *Hazard) Advise(a *pool.Advice) {
	now := h.clock.advance(a.Now)
	if a.Until > a.Now && len(a.Prints) > 0 && a.Prints[0]%heeded != 0 && !h.scorer.wishesTell() {
		return
	}
	for i := len(a.Prints) - 1; i >= 0; i-- {
		if n := h.match(a.Entries[i], a.Prints[i]); n != nil {
			if s, ok := h.advised(h.runs.at(n.run).state, a, now); ok {
				h.move(a.Entries[i], n, s)
			}
		} else if g := h.ghosts.find(a.Prints[i]); g != nil {
			if s, ok := h.advised(g.state(), a, now); ok {
				g.set(s)
			}
		}
	}
}

// advised returns the state of a block after an advice; false if that changes nothing.
func (h *Hazard) advised(s state, a *pool.Advice, now uint32) (state, bool) {
	class := advised(s.base, a)
	if class == s.base || class == s.class {
		return s, false
	}
	h.tables.enter(class, -1, 0, 1)
	return state{used: now, class: class, base: s.base}, true
}

// Class implements advisor.Policy: classes that differ only in their gap have one name, as in
// Report.
func (h *Hazard) Class(e uint32) string {
	n := h.find(e)
	if n == nil {
		return ""
	}
	return groupNames[h.runs.at(n.run).class/gaps]
}

// Report implements advisor.Policy. It names the classes that have entries, or had.
func (h *Hazard) Report() pool.PolicyReport {
	r := pool.PolicyReport{
		Name: HazardName, Entries: h.entries, Ghosts: h.ghosts.count, Bytes: h.bytes(),
		Lookups: h.lookups, Hits: h.hits, Refused: h.refused, Saved: h.saved,
	}
	for g := range groups {
		if pc := h.reportGroup(g); g < usedGroups || pc.Entries > 0 || pc.Evicted > 0 {
			r.Classes = append(r.Classes, pc)
		}
	}
	return r
}

// reportGroup describes the classes of all gaps together. Their worth is that of the mean entry.
func (h *Hazard) reportGroup(g int) pool.PolicyClass {
	pc := pool.PolicyClass{Name: groupNames[g]}
	next := inf
	for c := g * gaps; c < (g+1)*gaps; c++ {
		for _, k := range h.kinds {
			if k == nil {
				continue
			}
			pc.Evicted += k.removed[c]
			pc.Entries += int(k.held[c])
			pc.Worth += float64(k.held[c]) * float64(h.worths[c][0])
			next = min(next, k.least[c])
		}
	}
	if pc.Entries > 0 {
		pc.Worth /= float64(pc.Entries)
		if next < inf {
			pc.WorthNext = float64(next)
		}
	} else {
		pc.Worth = float64(h.worths[g*gaps][0])
	}
	return pc
}

func (h *Hazard) bytes() int64 {
	n := h.nodes.bytes() + h.runs.bytes() + h.ghosts.bytes() + int64(unsafe.Sizeof(*h))
	for _, k := range h.kinds {
		if k != nil {
			n += int64(unsafe.Sizeof(*k))
		}
	}
	return n
}

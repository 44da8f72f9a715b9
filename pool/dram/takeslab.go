package dram

import (
	"slices"

	"github.com/kvagent/kvagent/pool/dram/slab"
)

// A class that has no room takes a slab of another class, its donor. Entries of the donor are
// evicted, those that the policy names, until the donor has as many free slots as a slab: then what
// is left in one of its slabs is moved to the others.
//
//	donor, 3 slabs of 4:   [a b c d] [e f g h] [i j k l]
//	victims b e g k go:    [a . c d] [. f . h] [i j . l]
//	move f h to them:      [a f c d] [ free  ] [i j h l]
//
// So a slab costs the donor a slab's worth of entries, wherever the chains lie that these are part
// of, and as many moved at most. Between two slabs that one class takes it stores a slab. Entries
// evicted for a slab that could then not be emptied are free slots that the next one needs no
// victims for.

const (
	gatherStride = 256      // entries evicted before others may have the lock
	maxSurveys   = 16       // slabs of a class looked at for one without a held entry
	maxGathers   = 2        // slabs of each class of an entry gathered until it has its slots
	maxDrains    = 3        // slabs that one gathering begins to empty
	maxMoved     = 64 << 20 // bytes that a reservation moves, besides as many as it reserves
)

// wanted is what a reservation needs that takes copies or many evictions: a slab for a class. May
// says by which ways it may be had still; those that failed once are not tried again in a
// reservation.
type wanted struct {
	class   int32
	source  slabSources
	sources slabSources
}

// ways to empty a slab of another class.
type slabSources uint8

const (
	bySpare    slabSources = 1 << iota // of a class that has free slots for all of its entries
	byEviction                         // of a class whose entries are evicted for it
)

// want notes that a class needs a slab; false if that was tried in vain.
func (c *core) want(class int32, source slabSources) bool {
	if c.wanted.sources&source == 0 {
		return false
	}
	c.wanted.class, c.wanted.source = class, source
	return true
}

// gathering is the taking of one slab.
type gathering struct {
	*core
	classes  []int32 // of the entry that is to be reserved
	class    int32   // of them: the one without room
	source   slabSources
	barren   []int32 // classes that cannot give a slab
	donor    int32   // whose entries are evicted; slab.NoClass: to be chosen
	left     int64   // bytes that may still be evicted
	tenants  []tenant
	emptying int32 // slab to be emptied, with tenants; slab.NoSlab: none
}

// outcome of a step.
type outcome uint8

const (
	goOn    outcome = iota
	gotRoom         // or somebody else did
	empties         // the slab named by emptying has to be emptied
	inVain
)

// step evicts a stride of entries, or chooses the slab to be emptied.
func (g *gathering) step() outcome {
	g.work.refill()
	for range gatherStride {
		if g.slabs.Lacking(g.classes) != g.class {
			return gotRoom
		}
		if g.slabs.AnySpare() && g.chooseSpare() {
			return empties
		}
		if g.source != byEviction || g.left <= 0 {
			return inVain
		}
		if g.donor == slab.NoClass && !g.chooseDonor() {
			return inVain
		}
		g.evictOne()
	}
	return goOn
}

// evictOne evicts an entry of the donor, or gives the donor up.
func (g *gathering) evictOne() {
	e := g.advised(g.donor)
	if g.advisor == nil {
		e = g.oldestOf(g.donor, g.oldest(), farOldest)
	}
	if e == none {
		g.barren = append(g.barren, g.donor)
		g.donor = slab.NoClass
		return
	}
	g.left -= g.group(g.recs.All[e].ident).bytes
	g.evict(e)
}

// chooseSpare chooses the slab with the least in it of a class that has free slots for all of that.
// Held entries cannot be moved.
func (g *gathering) chooseSpare() bool {
	best, last, bestUsed := slab.NoSlab, slab.NoSlab, int64(0)
	for id := range g.slabs.Classes() {
		if !g.slabs.Spare(id) || id == g.class || slices.Contains(g.barren, id) {
			continue
		}
		n := g.movable(id)
		if n == slab.NoSlab {
			g.barren = append(g.barren, id)
			continue
		}
		last = n
		if used := g.slabs.UsedIn(n); best == slab.NoSlab || used < bestUsed {
			best, bestUsed = n, used
		}
	}
	if best == slab.NoSlab {
		return false
	}
	if best != last {
		g.tenants, _ = g.survey(best, g.tenants[:0])
	}
	g.emptying = best
	g.slabs.Drain(best)
	return true
}

// chooseDonor chooses the class, of those that have a slab to give, whose slots hold most of the
// oldest entries, or, if none of these can give one, any.
func (g *gathering) chooseDonor() bool {
	for {
		id := g.mostAged()
		for other := int32(0); id == slab.NoClass && other < g.slabs.Classes(); other++ {
			if g.slabs.SlabsOf(other) > 0 && g.mayGive(other) {
				id = other
			}
		}
		if id == slab.NoClass {
			return false
		}
		if g.movable(id) != slab.NoSlab {
			g.donor = id
			return true
		}
		g.barren = append(g.barren, id)
	}
}

func (g *gathering) mayGive(id int32) bool { return id != g.class && !slices.Contains(g.barren, id) }

// mostAged is the class of which the oldest entries have most slots; slab.NoClass if they have none
// of a class that may give.
func (g *gathering) mostAged() (most int32) {
	var seen [nearOldest]struct {
		class int32
		slots int
	}
	n, best := 0, -1
	for e, left := g.oldest(), nearOldest; e != none && left > 0; e, left = g.recs.All[e].newer, left-1 {
		for _, id := range g.group(g.recs.All[e].ident).classes {
			i := 0
			for i < n && seen[i].class != id {
				i++
			}
			if i == len(seen) || !g.mayGive(id) {
				continue
			}
			n = max(n, i+1)
			seen[i].class = id
			if seen[i].slots++; best < 0 || seen[i].slots > seen[best].slots {
				best = i
			}
		}
	}
	if best < 0 {
		return slab.NoClass
	}
	return seen[best].class
}

// movable is the slab with the fewest slots in use, of those of a class in which no entry is held,
// and which has a slot for the class without room in spite of its bad pages; slab.NoSlab if there
// is none among the first maxSurveys. Its tenants are in g.tenants.
func (g *gathering) movable(id int32) int32 {
	var near [maxSurveys]int32
	for _, n := range near[:g.slabs.Emptiest(id, g.class, near[:])] {
		var ok bool
		if g.tenants, ok = g.survey(n, g.tenants[:0]); ok {
			return n
		}
	}
	return slab.NoSlab
}

package dram

import (
	"slices"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/slab"
)

// A class without room takes a slab of another class, its donor. Entries of the donor are evicted,
// as the policy chooses, until the donor has as many free slots as a slab has. Then the rest of one
// of its slabs is moved to the others.
//
//	donor, 3 slabs of 4:   [a b c d] [e f g h] [i j k l]
//	evict b e g k:         [a . c d] [. f . h] [i j . l]
//	move f h to them:      [a f c d] [ free  ] [i j h l]
//
// So a slab costs the donor a slab's worth of entries, wherever their chains lie, and at most as
// many moves. A class stores a slab's worth between two slabs that it takes. Entries evicted for a
// slab that could then not be emptied leave free slots, which the next attempt uses.

const (
	gatherStride = 256      // entries evicted before the lock is released
	maxSurveys   = 16       // slabs of a class looked at for one without a held entry
	maxGathers   = 2        // slabs gathered for each class of an entry until it has its slots
	maxDrains    = 3        // slabs that one gathering begins to empty
	maxMoved     = 64 << 20 // bytes that a reservation moves, beyond as many as it reserves
)

// wanted is what a reservation needs that takes copies or many evictions: a slab for a class.
// sources are those not tried yet; one that failed is not tried again in a reservation.
type wanted struct {
	class   int32
	source  slabSources
	sources slabSources
}

// slabSources are the ways to empty a slab of another class.
type slabSources uint8

const (
	bySpare    slabSources = 1 << iota // of a class that has free slots for all entries of the slab
	byEviction                         // of a class whose entries are evicted for it
)

// want requests a slab for a class from a source; false if that was tried before and failed.
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
	class    int32   // the one of them without room
	source   slabSources
	barren   []int32 // classes that cannot give a slab
	donor    int32   // whose entries are evicted; slab.NoClass: not chosen yet
	left     int64   // bytes that may still be evicted
	tenants  []tenant
	emptying int32 // slab to be emptied, with tenants; slab.NoSlab: none
}

// outcome is the result of a step.
type outcome uint8

const (
	goOn    outcome = iota
	gotRoom         // or another reservation did
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

// evictOne evicts an entry of the donor, or gives up the donor.
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
	g.evict(e, pool.ByEviction)
}

// chooseSpare chooses the slab with the fewest used bytes, of classes with free slots for its
// entries. A slab with held entries cannot be emptied.
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

// chooseDonor chooses the class whose slots hold most of the oldest entries, of those that can give
// a slab; if none of these can, any other class.
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

// mostAged returns the class that has the most slots of the oldest entries; slab.NoClass if no
// class that may give has any.
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

// movable returns the slab with the fewest used slots, of those of a class that have no held entry
// and have a slot for the requesting class in spite of bad pages; slab.NoSlab if there is none
// among the first maxSurveys. Its tenants are in g.tenants.
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

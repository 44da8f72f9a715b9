package evict

const (
	ways         = 8
	minSets      = 128     // a power of two
	ghostsAnItem = 8       // ghosts per entry, at most
	maxGhosts    = 4 << 20 // 64 MB
)

// ghosts are blocks that are not stored: those evicted, and those looked up and not stored yet.
// They are in sets by their print; each set replaces the one used least recently. The table grows
// by one set at a time (linear hashing), so that growth never copies all of it.
type ghosts struct {
	pages[[ways]ghost]
	sets  uint // in use
	half  uint // the greatest power of two not above sets
	count int
}

// ghost is one block, by the lower 48 bits of its print.
type ghost struct {
	low   uint32
	used  uint32
	high  uint16
	class uint16
	base  uint16
	bin   uint8
	there bool
}

func ghostOf(print uint64, s state) ghost {
	g := ghost{low: uint32(print), high: uint16(print >> 32), there: true}
	g.set(s)
	return g
}

func (g *ghost) state() state { return state{used: g.used, class: g.class, base: g.base, bin: g.bin} }

func (g *ghost) set(s state) { g.used, g.class, g.base, g.bin = s.used, s.class, s.base, s.bin }

// set returns the set of a print.
func (g *ghosts) set(low uint32) *[ways]ghost {
	s := uint(low) & (2*g.half - 1)
	if s >= g.sets {
		s -= g.half
	}
	return g.at(uint32(s))
}

// find returns a ghost; nil if there is none.
func (g *ghosts) find(print uint64) *ghost {
	s := g.set(uint32(print))
	for i := range s {
		if s[i].low == uint32(print) && s[i].high == uint16(print>>32) && s[i].there {
			return &s[i]
		}
	}
	return nil
}

// put adds a ghost that is not there yet.
func (g *ghosts) put(x ghost) {
	s := g.set(x.low)
	at := &s[0]
	for i := range s {
		if !s[i].there {
			at = &s[i]
			break
		}
		if x.used-s[i].used > x.used-at.used {
			at = &s[i]
		}
	}
	if !at.there {
		g.count++
	}
	*at = x
}

// take removes a ghost.
func (g *ghosts) take(x *ghost) {
	x.there = false
	g.count--
}

// grow makes room for n ghosts, by this many sets at most.
func (g *ghosts) grow(n, steps int) {
	want := max(minSets, uint(n)/ways)
	for ; g.sets < want && (steps > 0 || g.sets < minSets); steps-- {
		to := g.make(uint32(g.sets))
		if g.sets++; g.sets <= minSets {
			g.half = minSets
			continue
		}
		from := g.at(uint32(g.sets - 1 - g.half))
		for i := range from {
			if x := &from[i]; x.there && uint(x.low)&g.half != 0 {
				to[i], *x = *x, ghost{}
			}
		}
		if g.sets == 2*g.half {
			g.half = g.sets
		}
	}
}

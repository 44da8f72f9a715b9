package evict

import "unsafe"

const (
	ways         = 20      // ghosts of a set: the more, the more alike their time to be forgotten
	setsAPage    = 256     // 64 KiB
	minSets      = 64      // a power of two
	ghostsAnItem = 8       // ghosts per entry, at most
	maxGhosts    = 4 << 20 // 54 MB
	maxAwaited   = 1 << 16 // blocks looked up, not stored before, and not stored yet
	sweepABlock  = 4       // ghosts that age per block looked up
)

// ghosts remember blocks that are not stored. They lie in sets by the hash of their key; the one put first makes
// room. The number of sets grows by one at a time (linear hashing), so that no look-up waits for a table to be copied.
type ghosts struct {
	pages []*[setsAPage]ghostSet
	sets  int // in use
	half  int // the greatest power of two of sets not above sets
	count int
	hand  int // set that ages next
	owed  int // ghosts still to be aged
}

// ghostSet is four cache lines.
type ghostSet struct {
	tag  [ways]uint32
	used [ways]uint32 // ms
	info [ways]ghostInfo
	hand uint64 // way that is given away next
}

// ghostInfo is 16 bits of the print<<16 | class<<9 | bin<<3 | awaited | there; 0 is an empty way.
type ghostInfo uint32

const (
	binMask      = 63 // of ghostInfo>>3
	ghostThere   = 1 << 0
	ghostAwaited = 1 << 1 // looked up and not found: its next insertion is no further use
)

func makeInfo(print uint64, class uint8, bin int) ghostInfo {
	return ghostInfo(print>>32)<<16 | ghostInfo(class)<<9 | ghostInfo(bin)<<3 | ghostThere
}

func (i ghostInfo) class() uint8  { return uint8(i>>9) & (numClasses - 1) }
func (i ghostInfo) bin() int      { return int(i>>3) & binMask }
func (i ghostInfo) uses() uint8   { return usesOf(i.class()) }
func (i ghostInfo) awaited() bool { return i&ghostAwaited != 0 }

func (i ghostInfo) withBin(bin int) ghostInfo {
	return i&^(binMask<<3) | ghostInfo(bin)<<3
}

func (g *ghosts) at(set int) *ghostSet { return &g.pages[set/setsAPage][set%setsAPage] }

// home is the set of a tag.
func (g *ghosts) home(tag uint32) int {
	s := int(tag) & (2*g.half - 1)
	if s >= g.sets {
		s -= g.half
	}
	return s
}

// find is the set of a print, and its way there; -1 if there is none.
func (g *ghosts) find(print uint64) (*ghostSet, int) {
	s := g.at(g.home(uint32(print)))
	return s, s.way(print)
}

func (s *ghostSet) way(print uint64) int {
	for i, t := range s.tag {
		if t == uint32(print) && s.info[i] != 0 && uint16(s.info[i]>>16) == uint16(print>>32) {
			return i
		}
	}
	return -1
}

// put adds a ghost that is not there.
func (g *ghosts) put(print uint64, used uint32, info ghostInfo) {
	if g.at(g.home(uint32(print))).put(uint32(print), used, info) {
		g.count++
	}
}

// put gives a ghost the next way; false if that takes the place of another.
func (s *ghostSet) put(tag, used uint32, info ghostInfo) bool {
	w := s.hand
	if s.hand++; s.hand == ways {
		s.hand = 0
	}
	empty := s.info[w] == 0
	s.tag[w], s.used[w], s.info[w] = tag, used, info
	return empty
}

func (g *ghosts) take(s *ghostSet, w int) {
	s.info[w] = 0
	g.count--
}

// grow makes sets for n ghosts, a few at a time.
func (g *ghosts) grow(n int) {
	want := max(minSets, n/ways)
	for steps := 2; g.sets < want && (steps > 0 || g.sets < minSets); steps-- {
		if g.sets == len(g.pages)*setsAPage {
			g.pages = append(g.pages, new([setsAPage]ghostSet))
		}
		if g.sets < minSets {
			g.sets, g.half = minSets, minSets
			continue
		}
		g.split()
	}
}

// split divides the next set among itself and a new one, each in the order they were put.
func (g *ghosts) split() {
	from, to := g.at(g.sets-g.half), g.at(g.sets)
	all := *from
	*from = ghostSet{}
	for i := range ways {
		w := (int(all.hand) + i) % ways
		if all.info[w] == 0 {
			continue
		}
		half := from
		if int(all.tag[w])&g.half != 0 {
			half = to
		}
		half.put(all.tag[w], all.used[w], all.info[w])
	}
	if g.sets++; g.sets == 2*g.half {
		g.half = g.sets
	}
}

func (g *ghosts) bytes() int64 {
	return int64(len(g.pages)) * int64(unsafe.Sizeof([setsAPage]ghostSet{})+unsafe.Sizeof(&g.pages[0]))
}

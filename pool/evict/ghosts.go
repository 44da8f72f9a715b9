package evict

import (
	"math/bits"
	"unsafe"
)

const (
	ways         = 16      // ghosts of a set: the more, the more alike their time to be forgotten
	setsAPage    = 256     // 64 KiB
	minSets      = 64      // a power of two
	ghostsAnItem = 8       // ghosts per entry, at most
	maxGhosts    = 4 << 20 // 54 MB
	sweepABlock  = 4       // ghosts that age per block looked up
	lateGhosts   = 32
)

// ghosts are blocks that are not stored any more. They are in sets by the hash of their key; each
// set replaces the oldest.
type ghosts struct {
	linear
	pages []*[setsAPage]ghostSet
	count int
	hand  uint // set that ages next
	owed  int  // ghosts still to be aged

	late  [lateGhosts]lateGhost // put, and not yet in their sets
	lates int
	seen  uint64 // keeps the loads of settle alive
}

// ghostSet is four cache lines. A search compares the marks, four at a time, and reads the rest
// only where a mark matches.
type ghostSet struct {
	marks [(ways + marksAWord - 1) / marksAWord]uint64 // bits 32 to 47 of each print
	way   [ways]ghostWay
	info  [ways]ghostInfo
	kind  [ways]uint8
	hand  uint8 // way to be replaced next
	_     [7]byte
}

// ghostWay is read only if the ghost's mark matches.
type ghostWay struct {
	tag  uint32 // bits 0 to 31 of the print
	used uint32 // ms
}

// lateGhost is a ghost whose set is loaded later: the loads of many sets overlap.
type lateGhost struct {
	print uint64
	used  uint32
	info  ghostInfo
	kind  uint8
}

// ghostInfo is paid | recent | class<<8 | bin<<2 | awaited | there; 0 is an empty way.
type ghostInfo uint32

const (
	marksAWord = 4
	markBits   = 64 / marksAWord
	lowBits    = 1 | 1<<markBits | 1<<(2*markBits) | 1<<(3*markBits) // the lowest bit of each mark
	highBits   = lowBits << (markBits - 1)                           // the highest

	binMask      = 63 // of ghostInfo>>2
	ghostThere   = 1 << 0
	ghostAwaited = 1 << 1  // looked up and not found: its next insertion is no further use
	ghostRecent  = 1 << 30 // LRU had it at its last use, and has it while that is after the cutoff
	ghostPaid    = 1 << 31 // ... and it is charged to the miss budget
)

func makeInfo(class uint16, bin int) ghostInfo {
	return ghostInfo(class)<<8 | ghostInfo(bin)<<2 | ghostThere
}

func (i ghostInfo) class() uint16 { return uint16(i>>8) & (numClasses - 1) }
func (i ghostInfo) bin() int      { return int(i>>2) & binMask }
func (i ghostInfo) uses() uint8   { return usesOf(i.class()) }
func (i ghostInfo) awaited() bool { return i&ghostAwaited != 0 }

func (i ghostInfo) withBin(bin int) ghostInfo {
	return i&^(binMask<<2) | ghostInfo(bin)<<2
}

func (g *ghosts) at(set uint) *ghostSet { return &g.pages[set/setsAPage][set%setsAPage] }

// find returns the set of a print, and its way there; -1 if there is none.
func (g *ghosts) find(print uint64) (*ghostSet, int) {
	if g.lates > 0 {
		g.settle()
	}
	s := g.at(g.home(print))
	return s, s.find(print)
}

func (s *ghostSet) find(print uint64) int {
	mark := uint64(uint16(print>>32)) * lowBits
	for i, m := range s.marks {
		m ^= mark
		// A matching mark has its highest bit set here. The mark above one may have it too.
		for alike := (m - lowBits) &^ m & highBits; alike != 0; alike &= alike - 1 {
			w := i*marksAWord + bits.TrailingZeros64(alike)/markBits
			if w < ways && s.way[w].tag == uint32(print) && m>>(w%marksAWord*markBits)&(1<<markBits-1) == 0 &&
				s.info[w] != 0 {
				return w
			}
		}
	}
	return -1
}

// put adds a ghost, in place of one of the same block: of a look-up whose blocks were mostly
// unknown, the rest was not searched, and was stored beside its ghosts.
func (g *ghosts) put(l *lateGhost) {
	s := g.at(g.home(l.print))
	if w := s.find(l.print); w >= 0 {
		g.take(s, w)
	}
	if s.put(l) {
		g.count++
	}
}

// putLate adds a ghost before the next search, at the latest.
func (g *ghosts) putLate(print uint64, used uint32, info ghostInfo, kind uint8) {
	l := &g.late[g.lates]
	l.print, l.used, l.info, l.kind = print, used, info, kind
	if g.lates++; g.lates == lateGhosts {
		g.settle()
	}
}

// settle adds the late ghosts to their sets, in order.
func (g *ghosts) settle() {
	late := g.late[:g.lates]
	for i := range late {
		s := g.at(g.home(late[i].print))
		g.seen += uint64(s.hand) + uint64(s.info[s.hand]) + uint64(s.way[s.hand].used)
	}
	for i := range late {
		g.put(&late[i])
	}
	g.lates = 0
}

// put adds a ghost at the next way; false if it replaces another.
func (s *ghostSet) put(l *lateGhost) bool {
	w := s.hand
	if s.hand++; s.hand == ways {
		s.hand = 0
	}
	empty := s.info[w] == 0
	s.way[w].tag, s.way[w].used, s.info[w], s.kind[w] = uint32(l.print), l.used, l.info, l.kind
	m, shift := &s.marks[w/marksAWord], w%marksAWord*markBits
	*m = *m&^((1<<markBits-1)<<shift) | uint64(uint16(l.print>>32))<<shift
	return empty
}

// print returns the lower 48 bits of the print of a way.
func (s *ghostSet) print(w int) uint64 {
	mark := s.marks[w/marksAWord] >> (w % marksAWord * markBits) & (1<<markBits - 1)
	return mark<<32 | uint64(s.way[w].tag)
}

func (g *ghosts) take(s *ghostSet, w int) {
	s.info[w] = 0
	g.count--
}

// grow makes sets for n ghosts, at most this many steps at a time.
func (g *ghosts) grow(n, steps int) {
	want := uint(max(minSets, n/ways))
	for ; g.sets < want && (steps > 0 || g.sets < minSets); steps-- {
		if g.sets == uint(len(g.pages))*setsAPage {
			g.pages = append(g.pages, new([setsAPage]ghostSet))
		}
		if g.sets < minSets {
			g.sets, g.half = minSets, minSets
			continue
		}
		g.split()
	}
}

// split divides the next set among itself and a new one, each in the order of insertion.
func (g *ghosts) split() {
	from, to := g.at(g.next()), g.at(g.sets)
	all := *from
	*from = ghostSet{}
	for i := range ways {
		w := (int(all.hand) + i) % ways
		if all.info[w] == 0 {
			continue
		}
		half := to
		if g.stays(uint64(all.way[w].tag)) {
			half = from
		}
		half.put(&lateGhost{all.print(w), all.way[w].used, all.info[w], all.kind[w]})
	}
	g.divided()
}

func (g *ghosts) bytes() int64 {
	return int64(len(g.pages)) * int64(unsafe.Sizeof([setsAPage]ghostSet{})+unsafe.Sizeof(&g.pages[0]))
}

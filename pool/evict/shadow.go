package evict

import (
	"math/bits"

	"github.com/kvagent/kvagent/pool"
)

const (
	maxShadow   = 4096  // entries of the shadow
	slack       = 0.002 // hits per block looked up by which the policy may be worse than LRU
	marginStart = 128   // blocks by which it may be worse before it has been better, ...
	marginBase  = 256   // ... later on ...
	marginShare = 32    // ... and this part of the entries
	again       = 4     // after an alarm the next comes so many times as soon
)

// shadow runs LRU on a sample of the blocks, as large a part of what LRU would hold as the sample is of all. The
// hits of both on the sample tell when what was learned is worse than LRU; then it is forgotten. With chains used from
// their end to their start, a block that LRU has is one whose whole prefix LRU has. The shadow has room for as many
// blocks as the pool has sampled ones: where the working set just fits, LRU hits all or nothing, and a sample that is
// a little too large for its room would hide that.
type shadow struct {
	shift                uint // one block of 1<<shift is in the sample
	slots                [maxShadow + 1]shadowSlot
	index                [2 * maxShadow]uint16 // open addressing by print
	newest, oldest, free uint16
	count                int

	levels             [17]int // entries of the pool by level: those sampled at shift s have level s or more
	lookups, hits, own uint64  // sampled: looked up, hits of LRU, hits of the policy
	room               int     // entries of the pool that are sampled: as many blocks as LRU would have of them
	spare              int     // blocks that were looked up, and LRU need not make room for as the pool must
	missing            int     // blocks that it has and the pool gave up
	margin             float64 // blocks by which the policy may still fall behind
	alarms             uint64
}

type shadowSlot struct {
	print        uint64
	newer, older uint16
	missing      bool
}

func (s *shadow) init() {
	s.clear()
	s.margin = marginStart
}

func (s *shadow) clear() {
	s.index = [2 * maxShadow]uint16{}
	s.newest, s.oldest, s.count, s.missing = 0, 0, 0, 0
	for i := range s.slots {
		s.slots[i] = shadowSlot{older: uint16(i + 1)}
	}
	s.slots[maxShadow].older = 0
	s.free = 1
}

// scale is the blocks that one of the sample stands for.
func (s *shadow) scale() float64 { return float64(uint64(1) << s.shift) }

func (s *shadow) sampled(print uint64) bool { return print>>48&(1<<s.shift-1) == 0 }

// see runs a look-up through the shadow, before the policy itself changes.
func (s *shadow) see(h *Hazard, u *pool.Use) {
	own, lru, seen := 0, 0, 0
	for i := len(u.Prints) - 1; i >= 0; i-- {
		p := u.Prints[i]
		if !s.sampled(p) {
			continue
		}
		seen++
		stored := i < len(u.Entries)
		if stored {
			own++
		}
		if c := s.find(p); s.index[c] != 0 {
			s.touch(s.index[c])
			lru++
		} else if stored {
			s.add(p, c)
		}
	}
	s.spare = max(0, lru-own)
	s.lookups, s.hits, s.own = s.lookups+uint64(seen), s.hits+uint64(lru), s.own+uint64(own)
	s.fit()
	h.judge(float64(own-lru), float64(seen), len(u.Prints))
}

// judge books the difference to LRU. When the policy falls behind, what was learned is forgotten, and LRU decides for
// a while.
func (h *Hazard) judge(ahead, seen float64, blocks int) {
	s := &h.shadow
	start := marginBase + float64(h.entries)/marginShare
	ahead, seen = ahead*s.scale(), seen*s.scale()
	h.credit.book(ahead, float64(blocks), h.entries)
	if h.humble.pass(blocks) {
		return
	}
	s.margin += ahead + slack*seen
	if s.margin >= 2*start { // as far ahead as counts
		s.margin = 2 * start
		h.humble.forgive()
	}
	if s.margin < 0 {
		h.tables.forget()
		h.humble.begin(h.entries)
		s.margin = start / again
		s.alarms++
	}
}

// level is the greatest shift at which a print is sampled, at most 16.
func level(print uint64) int { return bits.TrailingZeros64(print>>48 | 1<<16) }

// fit makes the sample small enough, and the shadow as large as the pool's part of it.
func (s *shadow) fit() {
	if s.room > maxShadow {
		s.coarsen()
	}
	s.trim(s.room)
}

// trim drops what was used least recently until so many blocks are left.
func (s *shadow) trim(room int) {
	for s.count > room && s.oldest != 0 {
		s.drop(s.oldest)
	}
}

// coarsen halves the sample.
func (s *shadow) coarsen() {
	s.room -= s.levels[s.shift]
	s.shift++
	for i := s.oldest; i != 0; {
		newer := s.slots[i].newer
		if !s.sampled(s.slots[i].print) {
			s.drop(i)
		}
		i = newer
	}
}

// touch makes a block the newest.
func (s *shadow) touch(i uint16) {
	if i != s.newest {
		s.unlink(i)
		s.link(i)
	}
}

// insert notes that the pool has one more block.
func (s *shadow) insert(print uint64) {
	s.levels[level(print)]++
	if !s.sampled(print) {
		return
	}
	s.room++
	c := s.find(print)
	i := s.index[c]
	if i == 0 {
		s.add(print, c)
		return
	}
	s.back(i)
	s.touch(i)
	s.spare = max(0, s.spare-1)
}

// lose notes that the pool gave a block up, to make room; so does LRU.
func (s *shadow) lose(print uint64) {
	s.levels[level(print)]--
	if !s.sampled(print) {
		return
	}
	s.room--
	if i := s.index[s.find(print)]; i != 0 && !s.slots[i].missing {
		s.slots[i].missing = true
		s.missing++
	}
	s.trim(s.room + s.spare)
}

// back notes that the pool has a block, or that it is no longer in the shadow.
func (s *shadow) back(i uint16) {
	if s.slots[i].missing {
		s.slots[i].missing = false
		s.missing--
	}
}

// add puts a block that the shadow has not into its cell.
func (s *shadow) add(print uint64, c int) {
	if s.free == 0 {
		s.drop(s.oldest)
		c = s.find(print)
	}
	i := s.free
	s.free = s.slots[i].older
	s.slots[i].print = print
	s.index[c] = i
	s.link(i)
	s.count++
}

func (s *shadow) drop(i uint16) {
	s.back(i)
	s.unlink(i)
	s.vacate(s.find(s.slots[i].print))
	s.slots[i].older = s.free
	s.free = i
	s.count--
}

// find is the cell of a print, or the empty one where it would go.
func (s *shadow) find(print uint64) int {
	c := int(print) & (len(s.index) - 1)
	for s.index[c] != 0 && s.slots[s.index[c]].print != print {
		c = (c + 1) & (len(s.index) - 1)
	}
	return c
}

// vacate empties a cell and moves what lies behind it nearer to its home.
func (s *shadow) vacate(c int) {
	mask := len(s.index) - 1
	for j := (c + 1) & mask; s.index[j] != 0; j = (j + 1) & mask {
		home := int(s.slots[s.index[j]].print) & mask
		if (j-home)&mask >= (j-c)&mask {
			s.index[c] = s.index[j]
			c = j
		}
	}
	s.index[c] = 0
}

func (s *shadow) link(i uint16) {
	s.slots[i].newer, s.slots[i].older = 0, s.newest
	if s.newest != 0 {
		s.slots[s.newest].newer = i
	} else {
		s.oldest = i
	}
	s.newest = i
}

func (s *shadow) unlink(i uint16) {
	x := &s.slots[i]
	if x.newer != 0 {
		s.slots[x.newer].older = x.older
	} else {
		s.newest = x.older
	}
	if x.older != 0 {
		s.slots[x.older].newer = x.newer
	} else {
		s.oldest = x.newer
	}
}

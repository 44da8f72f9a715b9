package advisor

import "github.com/kvagent/kvagent/pool"

// unlimited estimates how many blocks that were looked up and missed a pool would have had that
// evicts nothing. It keeps the prints of a sample of all blocks that were ever stored: those whose
// lowest bits are 0, fewer and fewer as there are more, so that they fit. A reset gives blocks
// other prints, so prints from before it do not count. Its memory is fixed, and so is its work for
// each block.
type unlimited struct {
	sets  [][ways]uint64 // nil before the first block
	bits  uint           // lowest bits of a print that are 0 in the sample: one block in 1 << bits
	extra uint64         // blocks missed that it would have had, about
}

const (
	setBits = 12 // of the number of sets: 256 KiB
	ways    = 8  // prints of a set, 0: none; a cache line
)

func (u *unlimited) samples(print uint64) bool { return print&(1<<u.bits-1) == 0 && print != 0 }

func (u *unlimited) set(print uint64) *[ways]uint64 { return &u.sets[print>>(64-setBits)] }

// stored adds blocks that were stored.
func (u *unlimited) stored(prints []uint64) {
	if u.sets == nil {
		u.sets = make([][ways]uint64, 1<<setBits)
	}
	for _, print := range prints {
		for u.samples(print) && !u.add(print) {
			u.bits++
		}
	}
}

// add adds a print to its set, where it replaces one that is not of the sample any more. It returns
// false if there is no room.
func (u *unlimited) add(print uint64) bool {
	set, free := u.set(print), -1
	for i, other := range set {
		if other == print {
			return true
		}
		if !u.samples(other) {
			free = i
		}
	}
	if free < 0 {
		return false
	}
	set[free] = print
	return true
}

// looked counts a look-up.
func (u *unlimited) looked(use *pool.Use) {
	if u.sets == nil {
		return
	}
	for _, print := range use.Prints[len(use.Entries):] {
		if !u.samples(print) {
			continue
		}
		for _, other := range u.set(print) {
			if other == print {
				u.extra += 1 << u.bits
				break
			}
		}
	}
}

package dram

import "github.com/kvagent/kvagent/pool"

// A pool's file, format 2. All numbers are little-endian; offsets are from the beginning of the file, and each area begins on
// a page of the file system (2 MiB on hugetlbfs). Who maps the arena alone cannot reach what says what is in it.
//
//	arena      the slots, slab after slab
//	headers    64 bytes a slot, the slots of a slab side by side; sparse: it grows as slabs are put to use
//	learned    two copies of what the policy learned; sparse
//	spaces     maxKeptSpaces records of spaceBytes; sparse
//	slabs      8 bytes a slab: which slots it is cut into, and where their headers are
//	superblock the last superBytes of the file
const (
	fileFormat = 2

	superBytes     = 4 << 10
	headerBytes    = 64
	spaceBytes     = 20 << 10 // one space: a full identity of the session protocol fits
	maxKeptSpaces  = 1 << 10  // spaces of a file; what is stored of a further one does not outlive the process
	slabWordBytes  = 8
	learnedBytes   = pool.MaxLearned + 4<<10 // one copy, its head included
	slotsPerHeader = 2                       // headers for twice the slots there can be, so that spans find their place between others
)

// slotUnit is what every slot is rounded up to, bytes.
const slotUnit = 1 << 10

// layout says where the areas of a file are. It follows from the three sizes.
type layout struct {
	arena, slab, page                      int64
	headers, learned, spaces, slabs, super int64 // offsets
	end                                    int64
}

func layoutOf(arena, slab, page int64) (l layout) {
	l.arena, l.slab, l.page = arena, slab, page
	l.headers = roundUp(arena, page)
	l.learned = roundUp(l.headers+l.cells()*headerBytes, page)
	l.spaces = roundUp(l.learned+2*learnedBytes, page)
	l.slabs = roundUp(l.spaces+maxKeptSpaces*spaceBytes, page)
	l.end = roundUp(l.slabs+l.slabCount()*slabWordBytes+superBytes, page)
	l.super = l.end - superBytes
	return l
}

func (l *layout) cells() int64     { return slotsPerHeader * l.arena / slotUnit }
func (l *layout) slabCount() int64 { return l.arena / l.slab }

// least is the memory that a file takes before anything is stored in it.
func (l *layout) least() int64 { return l.headers + l.end - l.slabs }

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }

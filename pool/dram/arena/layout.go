package arena

import "github.com/kvagent/kvagent/pool"

// A pool's file, format 2. All numbers are little-endian; offsets are from the beginning of the
// file, and each area begins on a page of the file system (2 MiB on hugetlbfs). Who maps the arena
// alone cannot reach what says what is in it.
//
//	arena      the slots, slab after slab
//	headers    64 bytes a slot, the slots of a slab side by side; sparse: it grows as slabs are put to use
//	learned    two copies of what the policy learned; sparse
//	spaces     MaxSpaces records of spaceBytes; sparse
//	slabs      8 bytes a slab: which slots it is cut into, and where their headers are
//	superblock the last superBytes of the file
const (
	fileFormat = 2

	superBytes    = 4 << 10
	HeaderBytes   = 64
	spaceBytes    = 20 << 10 // one space: a full identity of the session protocol fits
	MaxSpaces     = 1 << 10  // spaces of a file; what is stored of a further one does not outlive the process
	SlabWordBytes = 8
	learnedBytes  = pool.MaxLearned + 4<<10 // one copy, its head included
	// headers for twice the slots there can be, so that spans find their place between others
	slotsPerHeader = 2
)

// SlotUnit is what every slot is rounded up to, bytes.
const SlotUnit = 1 << 10

// Layout says where the areas of a file are. It follows from the three sizes.
type Layout struct {
	arena, slab, page                      int64
	Headers, Learned, Spaces, Slabs, Super int64 // offsets
	End                                    int64
}

// LayoutOf follows from the bytes of an arena, of a slab, and of a page.
func LayoutOf(arena, slab, page int64) (l Layout) {
	l.arena, l.slab, l.page = arena, slab, page
	l.Headers = roundUp(arena, page)
	l.Learned = roundUp(l.Headers+l.cells()*HeaderBytes, page)
	l.Spaces = roundUp(l.Learned+2*learnedBytes, page)
	l.Slabs = roundUp(l.Spaces+MaxSpaces*spaceBytes, page)
	l.End = roundUp(l.Slabs+l.SlabCount()*SlabWordBytes+superBytes, page)
	l.Super = l.End - superBytes
	return l
}

func (l *Layout) cells() int64 { return slotsPerHeader * l.arena / SlotUnit }

// SlabCount is the number of slabs.
func (l *Layout) SlabCount() int64 { return l.arena / l.slab }

// least is the memory that a file takes before anything is stored in it.
func (l *Layout) least() int64 { return l.Headers + l.End - l.Slabs }

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }

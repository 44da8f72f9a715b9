package arena

import "github.com/kvagent/kvagent/pool"

// A pool's file, format 2. All numbers are little-endian. Offsets are from the beginning of the
// file, and each area begins on a page of the file system (2 MiB on hugetlbfs). A process that maps
// the arena alone cannot access the other areas.
//
//	arena      the slots, slab after slab
//	headers    64 bytes a slot, those of a slab together; sparse, grows as slabs are used
//	learned    two copies of what the policy learned; sparse
//	spaces     MaxSpaces records of spaceBytes; sparse
//	slabs      8 bytes a slab: the slots it is cut into, and where their headers are
//	superblock the last superBytes of the file
const (
	fileFormat = 2

	superBytes    = 4 << 10
	HeaderBytes   = 64
	spaceBytes    = 20 << 10 // one space: not the largest of 256 shards in 16 groups with a long identity
	MaxSpaces     = 1 << 10  // spaces of a file; entries of further ones end with the process
	SlabWordBytes = 8
	learnedBytes  = pool.MaxLearned + 4<<10 // one copy, its head included
	// Twice the possible slots have headers, so that spans fit between others.
	slotsPerHeader = 2
)

// SlotUnit is the unit to which slots are rounded up, bytes.
const SlotUnit = 1 << 10

// Layout holds the offsets of the areas. It follows from the three sizes.
type Layout struct {
	arena, slab, page                      int64
	Headers, Learned, Spaces, Slabs, Super int64 // offsets
	End                                    int64
}

// LayoutOf returns the layout for the bytes of an arena, of a slab, and of a page.
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

// SlabCount returns the number of slabs.
func (l *Layout) SlabCount() int64 { return l.arena / l.slab }

// least returns the memory that a file takes before anything is stored in it.
func (l *Layout) least() int64 { return l.Headers + l.End - l.Slabs }

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }

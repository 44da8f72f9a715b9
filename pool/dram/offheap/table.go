package offheap

import (
	"math/bits"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The hash table: open addressing, linear probing. A hash's home is its top bits scaled to the size, so that
// order by home is order by hash at every size, and a table can be moved into a larger one from its front to its
// back, a few cells per insertion. A cell is entry<<32 | tag; the tag holds low bits of the hash and of the home,
// so that neither a miss nor a deletion looks at records.
const (
	homeBits = 12 // of a tag; the farthest a cell can lie from its home
	homeMask = 1<<homeBits - 1
	farthest = homeMask - 1

	firstCells    = 1 << 10
	loadNum       = 4 // a table grows at 4/5
	loadDen       = 5
	crowdedNum    = 9 // and takes nothing more at 9/10, if the kernel gave no memory to grow
	crowdedDen    = 10
	migrateStride = 16 // cells of the old table moved with each insertion
)

// Table finds entries by a hash. Its methods are called with the pool's lock held.
type Table struct {
	now Cells // where new hashes go
	old Cells // being moved into now: hashes with a home before moved are in now already
	// moved is the first cell of old not moved yet; the cell before it is empty
	moved int
	freed int // bytes of old given back
	n     int
}

// Cells are one of its halves.
type Cells struct {
	raw  []byte
	Cell []uint64 // size homes and the cells behind the last
	size uint64
}

func mapCells(size int) (c Cells, err error) {
	n := size + homeMask + 1
	c.raw, err = unix.Mmap(-1, 0, (n*8+pageBytes-1)&^(pageBytes-1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return c, err
	}
	if len(c.raw) >= hugeFrom {
		// Only advice: without huge pages everything works, slower.
		_ = unix.Madvise(c.raw, unix.MADV_HUGEPAGE)
	}
	c.Cell = unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(c.raw))), n)
	c.size = uint64(size)
	return c, nil
}

func (c *Cells) close() error {
	if c.raw == nil {
		return nil
	}
	raw := c.raw
	*c = Cells{}
	return unix.Munmap(raw)
}

func (c *Cells) home(hash uint64) int {
	hi, _ := bits.Mul64(hash, c.size)
	return int(hi)
}

// TagOf is the tag of a cell for a hash with this home.
func TagOf(hash uint64, home int) uint32 { return uint32(hash)<<homeBits | uint32(home)&homeMask }

// homeAt is the home of what lies in cell i.
func homeAt(i int, cell uint64) int { return i - (i-int(cell))&homeMask }

// Side is the half of the table a hash belongs to.
func (t *Table) Side(hash uint64) (c *Cells, home int) {
	if t.old.size != 0 {
		if home = t.old.home(hash); home >= t.moved {
			return &t.old, home
		}
	}
	return &t.now, t.now.home(hash)
}

// Put adds an entry that is not in the table; false if there is no room.
func (t *Table) Put(hash uint64, e uint32) bool {
	c, home := t.Side(hash)
	if t.old.size == 0 && uint64(t.n)*crowdedDen >= c.size*crowdedNum {
		return false
	}
	if !c.put(hash, home, e) {
		return false
	}
	t.n++
	return true
}

func (c *Cells) put(hash uint64, home int, e uint32) bool {
	for i := home; i-home <= farthest; i++ {
		if c.Cell[i] == 0 {
			c.Cell[i] = uint64(e)<<32 | uint64(TagOf(hash, home))
			return true
		}
	}
	return false
}

// Remove takes an entry that is in the table out of it, and moves what lies behind it nearer to its home.
func (t *Table) Remove(hash uint64, e uint32) {
	c, i := t.Side(hash)
	for ; uint32(c.Cell[i]>>32) != e; i++ {
		if c.Cell[i] == 0 {
			panic("dram: an entry is not where its hash says")
		}
	}
	for j := i + 1; c.Cell[j] != 0; j++ {
		if homeAt(j, c.Cell[j]) <= i {
			c.Cell[i] = c.Cell[j]
			i = j
		}
	}
	c.Cell[i] = 0
	t.n--
}

// Candidate is the first entry at or behind cell i whose tag fits, and the cell it was in; 0 if there is none.
func (c *Cells) Candidate(i int, tag uint32) (uint32, int) {
	for ; ; i++ {
		cell := c.Cell[i]
		if uint32(cell) == tag && cell != 0 {
			return uint32(cell >> 32), i
		}
		if cell == 0 {
			return 0, i
		}
	}
}

package offheap

import (
	"math/bits"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The hash table uses open addressing with linear probing. A hash's home is its top bits scaled to
// the size. A cell is entry<<32 | tag; the tag holds low bits of the hash and of the home, so
// neither a miss nor a deletion reads records.
const (
	homeBits = 12 // of a tag; bounds the distance of a cell from its home
	homeMask = 1<<homeBits - 1
	farthest = homeMask - 1

	firstCells = 1 << 10
	loadNum    = 4 // a table that is full has entries in 4/5 of its cells
	loadDen    = 5
)

// Table finds entries by a hash. Its methods are called with the pool's lock held.
type Table struct {
	raw  []byte
	cell []uint64 // size homes, and the cells after the last
	size uint64
	n    int
}

// OpenTable makes an empty table with cells for this many entries.
func OpenTable(entries int) (t Table, err error) {
	size := max(firstCells, entries*loadDen/loadNum+1)
	n := size + homeMask + 1
	t.raw, err = unix.Mmap(
		-1, 0, (n*8+pageBytes-1)&^(pageBytes-1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS,
	)
	if err != nil {
		return t, err
	}
	if len(t.raw) >= hugeFrom {
		// This is only advice: the table works without huge pages, but is slower.
		_ = unix.Madvise(t.raw, unix.MADV_HUGEPAGE)
	}
	t.cell = unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(t.raw))), n)
	t.size = uint64(size)
	return t, nil
}

// Close unmaps the memory.
func (t *Table) Close() error {
	if t.raw == nil {
		return nil
	}
	raw := t.raw
	*t = Table{}
	return unix.Munmap(raw)
}

// Fit makes the table large enough for this many entries; false: no memory. It moves all that it
// has, whose hashes hash returns.
func (t *Table) Fit(entries int, hash func(e uint32) uint64) bool {
	if uint64(entries)*loadDen < t.size*loadNum {
		return true
	}
	larger, err := OpenTable(entries)
	if err != nil {
		return false
	}
	for _, cell := range t.cell {
		if e := uint32(cell >> 32); cell != 0 && !larger.Put(hash(e), e) {
			return larger.Close() != nil
		}
	}
	old := *t
	*t = larger
	return old.Close() == nil
}

// Home returns the cell from which a hash is searched.
func (t *Table) Home(hash uint64) int {
	hi, _ := bits.Mul64(hash, t.size)
	return int(hi)
}

// TagOf returns the tag of a cell for a hash with this home.
func TagOf(hash uint64, home int) uint32 { return uint32(hash)<<homeBits | uint32(home)&homeMask }

// homeAt returns the home of the entry in cell i.
func homeAt(i int, cell uint64) int { return i - (i-int(cell))&homeMask }

// Put adds an entry that is not in the table; false if there is no room.
func (t *Table) Put(hash uint64, e uint32) bool {
	home := t.Home(hash)
	for i := home; i-home <= farthest; i++ {
		if t.cell[i] == 0 {
			t.cell[i] = uint64(e)<<32 | uint64(TagOf(hash, home))
			t.n++
			return true
		}
	}
	return false
}

// Remove removes an entry that is in the table, and moves the cells after it nearer to their homes.
func (t *Table) Remove(hash uint64, e uint32) {
	i := t.Home(hash)
	for ; uint32(t.cell[i]>>32) != e; i++ {
		if t.cell[i] == 0 {
			panic("dram: an entry is not where its hash says")
		}
	}
	for j := i + 1; t.cell[j] != 0; j++ {
		if homeAt(j, t.cell[j]) <= i {
			t.cell[i] = t.cell[j]
			i = j
		}
	}
	t.cell[i] = 0
	t.n--
}

// At returns a cell.
func (t *Table) At(i int) uint64 { return t.cell[i] }

// Candidate returns the first entry from cell i on whose tag matches, or 0, and its cell.
func (t *Table) Candidate(i int, tag uint32) (uint32, int) {
	for ; ; i++ {
		cell := t.cell[i]
		if uint32(cell) == tag && cell != 0 {
			return uint32(cell >> 32), i
		}
		if cell == 0 {
			return 0, i
		}
	}
}

// Entries returns the number of entries.
func (t *Table) Entries() int { return t.n }

// Mapped returns the memory, all of which counts as held.
func (t *Table) Mapped() []byte { return t.raw }

package offheap

import (
	"math/bits"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The hash table uses open addressing with linear probing. A hash's home is its top bits scaled to
// the size, so order by home is order by hash at every size, and a table is moved to a larger one
// from its front to its back, a few buckets per insertion. A bucket is entry<<32 | tag; the tag
// holds low bits of the hash and of the home, so neither a miss nor a deletion reads records.
const (
	homeBits = 12 // of a tag; bounds the distance of a bucket from its home
	homeMask = 1<<homeBits - 1
	farthest = homeMask - 1

	firstCells    = 1 << 10
	loadNum       = 4 // a table grows at 4/5
	loadDen       = 5
	migrateStride = 16 // buckets of the old table moved with each insertion
)

// Table finds entries by a hash. Its methods are called with the pool's lock held.
type Table struct {
	now Buckets // for new hashes
	old Buckets // being moved into now; hashes with a home before moved are already in now
	// moved is the first bucket of old not moved yet; the bucket before it is empty.
	moved int
	freed int // bytes of old that were freed
	n     int
}

// Buckets are one half of the table.
type Buckets struct {
	raw    []byte
	Bucket []uint64 // size homes, and the buckets after the last
	size   uint64
}

func mapCells(size int) (c Buckets, err error) {
	n := size + homeMask + 1
	c.raw, err = unix.Mmap(
		-1, 0, (n*8+pageBytes-1)&^(pageBytes-1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS,
	)
	if err != nil {
		return c, err
	}
	if len(c.raw) >= hugeFrom {
		// This is only advice: the table works without huge pages, but is slower.
		_ = unix.Madvise(c.raw, unix.MADV_HUGEPAGE)
	}
	c.Bucket = unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(c.raw))), n)
	c.size = uint64(size)
	return c, nil
}

func (c *Buckets) close() error {
	if c.raw == nil {
		return nil
	}
	raw := c.raw
	*c = Buckets{}
	return unix.Munmap(raw)
}

func (c *Buckets) home(hash uint64) int {
	hi, _ := bits.Mul64(hash, c.size)
	return int(hi)
}

// TagOf returns the tag of a bucket for a hash with this home.
func TagOf(hash uint64, home int) uint32 { return uint32(hash)<<homeBits | uint32(home)&homeMask }

// homeAt returns the home of the entry in bucket i.
func homeAt(i int, bucket uint64) int { return i - (i-int(bucket))&homeMask }

// Side returns the half of the table that a hash belongs to, and its home there.
func (t *Table) Side(hash uint64) (c *Buckets, home int) {
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
	if !c.put(hash, home, e) {
		return false
	}
	t.n++
	return true
}

func (c *Buckets) put(hash uint64, home int, e uint32) bool {
	for i := home; i-home <= farthest; i++ {
		if c.Bucket[i] == 0 {
			c.Bucket[i] = uint64(e)<<32 | uint64(TagOf(hash, home))
			return true
		}
	}
	return false
}

// Remove removes an entry that is in the table, and moves the buckets after it nearer to their
// homes.
func (t *Table) Remove(hash uint64, e uint32) {
	c, i := t.Side(hash)
	for ; uint32(c.Bucket[i]>>32) != e; i++ {
		if c.Bucket[i] == 0 {
			panic("dram: an entry is not where its hash says")
		}
	}
	for j := i + 1; c.Bucket[j] != 0; j++ {
		if homeAt(j, c.Bucket[j]) <= i {
			c.Bucket[i] = c.Bucket[j]
			i = j
		}
	}
	c.Bucket[i] = 0
	t.n--
}

// Candidate returns the first entry from bucket i on whose tag matches, or 0, and its bucket.
func (c *Buckets) Candidate(i int, tag uint32) (uint32, int) {
	for ; ; i++ {
		bucket := c.Bucket[i]
		if uint32(bucket) == tag && bucket != 0 {
			return uint32(bucket >> 32), i
		}
		if bucket == 0 {
			return 0, i
		}
	}
}

// Grow starts a larger table when this one is full enough, or continues to move to the one started.
// It is called before each insertion and does a bounded amount of work. hash returns the hash of an
// entry.
func (t *Table) Grow(hash func(entries []uint32, hashes []uint64)) {
	if t.old.size != 0 {
		t.migrate(hash)
		return
	}
	if uint64(t.n)*loadDen < t.now.size*loadNum {
		return
	}
	larger, err := mapCells(int(t.now.size + t.now.size/2))
	if err != nil {
		return // retried with the next insertion; Put refuses entries once the table is full
	}
	t.old, t.now, t.moved, t.freed = t.now, larger, 0, 0
}

// migrate moves migrateStride buckets, and then up to the next empty one: the buckets after that
// have their home there.
func (t *Table) migrate(hash func([]uint32, []uint64)) {
	var entries [migrateStride]uint32
	var hashes [migrateStride]uint64
	end := len(t.old.Bucket)
	for i, stop := t.moved, t.moved+migrateStride; ; {
		n := 0
		for ; n < migrateStride && i < end && (i < stop || t.old.Bucket[i] != 0); i++ {
			if bucket := t.old.Bucket[i]; bucket != 0 {
				entries[n] = uint32(bucket >> 32)
				n++
			}
		}
		hash(entries[:n], hashes[:n])
		for j := range n {
			if !t.now.put(hashes[j], t.now.home(hashes[j]), entries[j]) {
				panic("dram: no room in a table just made larger")
			}
		}
		if i >= end || (i >= stop && t.old.Bucket[i] == 0) {
			t.moved = i + 1
			break
		}
	}
	t.giveBack(end)
}

// giveBack frees the memory of the old table up to end, in large pieces.
func (t *Table) giveBack(end int) {
	if t.moved >= end {
		_ = t.old.close() // an unmap of an own mapping does not fail
		t.moved, t.freed = 0, 0
		return
	}
	if done := t.moved * 8 &^ (hugeBytes - 1); done > t.freed {
		_ = unix.Madvise(t.old.raw[t.freed:done], unix.MADV_DONTNEED) // only advice
		t.freed = done
	}
}

// Close unmaps the memory.
func (t *Table) Close() error {
	if err := t.old.close(); err != nil {
		return err
	}
	return t.now.close()
}

// OpenTable makes an empty table.
func OpenTable() (t Table, err error) {
	t.now, err = mapCells(firstCells)
	return t, err
}

// Reserve makes an empty table large enough for n entries, if the kernel gives the memory.
func (t *Table) Reserve(n int) {
	if larger, err := mapCells(max(firstCells, n*loadDen/loadNum+n/8)); err == nil {
		_ = t.now.close() // an unmap of an own mapping does not fail
		t.now = larger
	}
}

// Entries returns the number of entries.
func (t *Table) Entries() int { return t.n }

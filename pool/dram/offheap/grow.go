package offheap

import "golang.org/x/sys/unix"

// Grow starts a larger table when this one is full enough, or moves on with the one that was started. It is
// called before each insertion and does a bounded amount of work. hash gives the hash of an entry.
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
		return // tried again with the next insertion; put refuses when it gets crowded
	}
	t.old, t.now, t.moved, t.freed = t.now, larger, 0, 0
}

// migrate moves migrateStride cells, and goes on to the next empty one: what lies behind it has its home there.
func (t *Table) migrate(hash func([]uint32, []uint64)) {
	var entries [migrateStride]uint32
	var hashes [migrateStride]uint64
	end := len(t.old.Cell)
	for i, stop := t.moved, t.moved+migrateStride; ; {
		n := 0
		for ; n < migrateStride && i < end && (i < stop || t.old.Cell[i] != 0); i++ {
			if cell := t.old.Cell[i]; cell != 0 {
				entries[n] = uint32(cell >> 32)
				n++
			}
		}
		hash(entries[:n], hashes[:n])
		for j := range n {
			if !t.now.put(hashes[j], t.now.home(hashes[j]), entries[j]) {
				panic("dram: no room in a table just made larger")
			}
		}
		if i >= end || (i >= stop && t.old.Cell[i] == 0) {
			t.moved = i + 1
			break
		}
	}
	t.giveBack(end)
}

// giveBack frees the memory of the old table behind what moved, in large pieces.
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

// Resident is the memory both halves hold. A table under construction is touched from its front on.
func (t *Table) Resident() int64 {
	touched := int(t.now.size) * 8
	if t.old.size != 0 {
		touched = int(uint64(t.moved) * t.now.size / t.old.size * 8)
	}
	touched += pageBytes // of the cells behind the last home
	step := pageBytes
	if len(t.now.raw) >= hugeFrom {
		step = hugeBytes
	}
	return int64(len(t.old.raw)-t.freed) + int64(min(len(t.now.raw), (touched+step-1)&^(step-1)))
}

// Close gives the memory back.
func (t *Table) Close() error {
	if err := t.old.close(); err != nil {
		return err
	}
	return t.now.close()
}

// OpenTable is an empty one.
func OpenTable() (t Table, err error) {
	t.now, err = mapCells(firstCells)
	return t, err
}

// Reserve makes an empty table one that need not grow while it takes n entries.
func (t *Table) Reserve(n int) bool {
	larger, err := mapCells(max(firstCells, n*loadDen/loadNum+n/8))
	if err != nil {
		return false
	}
	old := t.now
	t.now = larger
	return old.close() == nil
}

// Entries is how many there are.
func (t *Table) Entries() int { return t.n }

// Mapped is the memory of both halves.
func (t *Table) Mapped() (now, old []byte) { return t.now.raw, t.old.raw }

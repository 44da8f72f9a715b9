package arena

import "hash/crc32"

// The state that the policy learned is in a file twice, so that one copy is whole while the other
// is written:
//
//	0   0: none; else, in one store: CRC-32C of the number and the bytes (uint32), length of the
//	    bytes (uint32)
//	8   number (uint64): the copy with the higher one is the later
//	16  the bytes that pool.Learner returned
const learnedHead = 16

// learnedCopy returns the part of a copy that has memory.
func (f *File) learnedCopy(i int) []byte {
	n := int64(min(word(f.whole, superLearned).Load(), learnedBytes))
	return f.area(f.super.Learned+int64(i)*learnedBytes, n)
}

// readLearned returns the later whole copy, or nil, its number, and its index.
func (f *File) readLearned() (b []byte, number uint64, from int) {
	for i := range 2 {
		c := f.learnedCopy(i)
		if len(c) < learnedHead {
			continue
		}
		w := word(c, 0).Load()
		n := int(w >> 32)
		if w == 0 || n > len(c)-learnedHead || uint32(w) != crc32.Checksum(c[8:learnedHead+n], castagnoli) {
			continue
		}
		if m := word(c, 8).Load(); b == nil || m > number {
			b, number, from = append([]byte(nil), c[learnedHead:learnedHead+n]...), m, i
		}
	}
	return b, number, from
}

// writeLearned replaces the older copy, unless the bytes are too long or have no room.
func (f *File) writeLearned(b []byte) {
	if !f.provideLearned(int64(len(b) + learnedHead)) {
		return
	}
	_, number, from := f.readLearned()
	c := f.learnedCopy(1 - from)
	word(c, 0).Store(0)
	word(c, 8).Store(number + 1)
	copy(c[learnedHead:], b)
	word(c, 0).Store(uint64(len(b))<<32 | uint64(crc32.Checksum(c[8:learnedHead+len(b)], castagnoli)))
}

// provideLearned allocates memory for n bytes in both copies.
func (f *File) provideLearned(n int64) bool {
	if n > learnedBytes {
		return false
	}
	if uint64(n) <= word(f.whole, superLearned).Load() {
		return true
	}
	n = roundUp(n, superBytes)
	page, at := f.super.page, f.super.Learned
	for range 2 {
		if f.provide(at/page*page, roundUp(at+n, page)) != nil {
			return false
		}
		at += learnedBytes
	}
	word(f.whole, superLearned).Store(uint64(n))
	return true
}

// SavedLearned returns what was saved; nil if there is nothing, or it cannot be read.
func (f *File) SavedLearned() (b []byte) {
	if !f.Touch(func() { b, _, _ = f.readLearned() }) {
		return nil
	}
	return b
}

// SaveLearned saves what the policy learned. It needs no lock, but one caller at a time.
func (f *File) SaveLearned(b []byte) { f.Touch(func() { f.writeLearned(b) }) }

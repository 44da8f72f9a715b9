package arena

import (
	"hash/crc32"

	"github.com/kvagent/kvagent/pool"
)

// A space in a file. Headers name it by the number of its record and by its generation, which grows
// with each reset and when the record is given to another space, so that entries stored before that
// are never found again.
//
//	0   0: none; else, in one store: CRC-32C of what follows the generation (uint32), its length
//	    (uint32)
//	8   generation (uint64)
//	16  fingerprint (16), shards, groups (uint32); for each group its block tokens and the bytes
//	    of each shard (uint32); the identity up to the end
const spaceHead = 16

// SpaceRecord is a space in a file. Its methods access the file, so they run within Touch.
type SpaceRecord []byte

// SpaceAt returns a record below SpacesUsed.
func (f *File) SpaceAt(n int) SpaceRecord {
	return f.area(f.super.Spaces+int64(n)*spaceBytes, spaceBytes)
}

// SpacesUsed returns how many records were ever used. Further ones have no memory and must not be
// accessed.
func (f *File) SpacesUsed() (n int) {
	f.Touch(func() { n = int(min(word(f.whole, superSpaces).Load(), MaxSpaces)) })
	return n
}

// Turn starts a new generation and returns it.
func (r SpaceRecord) Turn() uint32 { return uint32(word(r, 8).Add(1)) }

// Generation returns the current generation.
func (r SpaceRecord) Generation() uint32 { return uint32(word(r, 8).Load()) }

// Used reports whether there is a space, damaged or not.
func (r SpaceRecord) Used() bool { return word(r, 0).Load() != 0 }

// Remove removes the space of the record.
func (r SpaceRecord) Remove() { word(r, 0).Store(0) }

// Write replaces the space of the record. Turn must have been called.
func (r SpaceRecord) Write(b []byte) {
	r.Remove()
	copy(r[spaceHead:], b)
	word(r, 0).Store(uint64(len(b))<<32 | uint64(max(crc32.Checksum(b, castagnoli), 1)))
}

// Read returns the space of a record; false if there is none, or it is damaged.
func (r SpaceRecord) Read() (s pool.Spec, ok bool) {
	w := word(r, 0).Load()
	n := int(w >> 32)
	if w == 0 || n > len(r)-spaceHead {
		return s, false
	}
	b := r[spaceHead : spaceHead+n]
	if uint32(w) != max(crc32.Checksum(b, castagnoli), 1) {
		return s, false
	}
	return decodeSpec(b)
}

// EncodeSpec encodes a space for a record; false if it is too large.
func EncodeSpec(s *pool.Spec) (b []byte, fits bool) {
	b = append(b, s.Fingerprint[:]...)
	b = le.AppendUint32(b, uint32(s.Shards))
	b = le.AppendUint32(b, uint32(len(s.Groups)))
	for _, g := range s.Groups {
		b = le.AppendUint32(b, g.BlockTokens)
		for _, n := range g.ShardBytes {
			b = le.AppendUint32(b, n)
		}
	}
	b = append(b, s.Identity...)
	return b, len(b) <= spaceBytes-spaceHead
}

func decodeSpec(b []byte) (s pool.Spec, ok bool) {
	if len(b) < 24 {
		return s, false
	}
	copy(s.Fingerprint[:], b)
	shards, groups := le.Uint32(b[16:]), le.Uint32(b[20:])
	b = b[24:]
	if shards > pool.MaxShards || groups > pool.MaxGroups || len(b) < int(groups*(1+shards)*4) {
		return s, false
	}
	s.Shards = int(shards)
	for range groups {
		g := pool.Group{BlockTokens: le.Uint32(b)}
		b = b[4:]
		for range shards {
			g.ShardBytes = append(g.ShardBytes, le.Uint32(b))
			b = b[4:]
		}
		s.Groups = append(s.Groups, g)
	}
	s.Identity = append([]byte(nil), b...)
	return s, true
}

// FreeRecord returns the number of a record without a space.
func (f *File) FreeRecord() (n int, ok bool) {
	if !f.Touch(func() { word(f.whole, superSpaces).Load() }) {
		return 0, false // which are used is unknown
	}
	used := f.SpacesUsed()
	for n := range used {
		free := false
		f.Touch(func() { free = word(f.SpaceAt(n), 0).Load() == 0 })
		if free {
			return n, true
		}
	}
	if used == MaxSpaces {
		return 0, false
	}
	at := f.super.Spaces + int64(used)*spaceBytes
	from := at / f.super.page * f.super.page
	if f.provide(from, roundUp(at+spaceBytes, f.super.page)) != nil {
		f.refused++
		return 0, false
	}
	return used, f.Touch(func() { word(f.whole, superSpaces).Store(uint64(used) + 1) })
}

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

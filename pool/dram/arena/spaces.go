package arena

import (
	"bytes"
	"encoding/json"
	"hash/crc32"
	"sync/atomic"
	"unsafe"

	"github.com/kvagent/kvagent/pool"
)

// SpaceRecord is a space in a file, or none. Headers name it by the number of its record and by its
// generation, which grows with each reset and when the record is given to another space, so that
// entries stored before that are never found again.
//
//	0   0: none; else, in one store: CRC-32C of the bytes (uint32), their length (uint32)
//	8   the generation (uint64)
//	16  the bytes
//
// Its methods access the file, so they run within Touch.
type SpaceRecord []byte

const recordHead = 16

func word(b []byte) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&b[0])) }

func (r SpaceRecord) state() *atomic.Uint64 { return word(r) }

func stateOf(b []byte) uint64 {
	return uint64(len(b))<<32 | uint64(max(crc32.Checksum(b, castagnoli), 1))
}

// SpaceAt returns a record below SpacesUsed.
func (f *File) SpaceAt(n int) SpaceRecord { return f.area(f.spaceOffset(n), spaceBytes) }

func (f *File) spaceOffset(n int) int64 { return f.layout.Spaces + int64(n)*spaceBytes }

// SpacesUsed returns how many records were ever used. Further ones have no memory.
func (f *File) SpacesUsed() (n int) {
	f.Touch(func() { n = int(min(f.super.spaces.Load(), MaxSpaces)) })
	return n
}

// Turn starts a new generation and returns it.
func (r SpaceRecord) Turn() uint32 { return uint32(word(r[8:]).Add(1)) }

// Generation returns the current generation.
func (r SpaceRecord) Generation() uint32 { return uint32(word(r[8:]).Load()) }

// Used reports whether there is a space, damaged or not.
func (r SpaceRecord) Used() bool { return r.state().Load() != 0 }

// Remove removes the space of the record.
func (r SpaceRecord) Remove() { r.state().Store(0) }

// Write replaces the space of the record by an encoded one. Turn must have been called.
func (r SpaceRecord) Write(b []byte) {
	r.Remove()
	copy(r[recordHead:], b)
	r.state().Store(stateOf(b))
}

// Read returns the space of a record; false if there is none, or it is damaged.
func (r SpaceRecord) Read() (s pool.Spec, ok bool) {
	w := r.state().Load()
	n := int(w >> 32)
	if w == 0 || n > len(r)-recordHead {
		return s, false
	}
	b := bytes.Clone(r[recordHead:][:n])
	return s, w == stateOf(b) && json.Unmarshal(b, &s) == nil
}

// EncodeSpec encodes a space for a record; false if it is too large.
func EncodeSpec(s *pool.Spec) (b []byte, fits bool) {
	b, err := json.Marshal(s)
	return b, err == nil && len(b) <= spaceBytes-recordHead
}

// FreeRecord returns the number of a record without a space.
func (f *File) FreeRecord() (n int, ok bool) {
	used := f.SpacesUsed()
	for n := range used {
		free := false
		f.Touch(func() { free = !f.SpaceAt(n).Used() })
		if free {
			return n, true
		}
	}
	if used == MaxSpaces || !f.grow(f.spaceOffset(used), f.spaceOffset(used+1)) {
		return 0, false
	}
	// It fails if SpacesUsed did.
	return used, f.Touch(func() { f.super.spaces.Store(uint64(used) + 1) })
}

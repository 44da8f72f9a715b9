package arena

import (
	"bytes"
	"encoding/json"
	"hash/crc32"
	"sync/atomic"
	"unsafe"

	"github.com/kvagent/kvagent/pool"
)

// record is a part of a file that holds some bytes, or none:
//
//	0   0: none; else, in one store: CRC-32C of the bytes (uint32), their length (uint32)
//	8   a number (uint64)
//	16  the bytes
//
// Its methods access the file, so they run within Touch.
type record []byte

const recordHead = 16

func (r record) word(at int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&r[at])) }

func (r record) state() *atomic.Uint64 { return r.word(0) }

func (r record) number() *atomic.Uint64 { return r.word(8) }

// read returns a copy of the bytes; nil if there are none, or they are damaged.
func (r record) read() []byte {
	w := r.state().Load()
	if n := int(w >> 32); n <= len(r)-recordHead {
		if b := bytes.Clone(r[recordHead:][:n]); w != 0 && w == stateOf(b) {
			return b
		}
	}
	return nil
}

// write replaces the bytes, for which there must be room.
func (r record) write(b []byte) {
	r.state().Store(0)
	copy(r[recordHead:], b)
	r.state().Store(stateOf(b))
}

func stateOf(b []byte) uint64 {
	return uint64(len(b))<<32 | uint64(max(crc32.Checksum(b, castagnoli), 1))
}

// SpaceRecord is a space in a file. Headers name it by the number of its record and by its
// turn, which grows with each reset and when the record is given to another space, so that
// entries stored before that are never found again. Its methods run within Touch.
type SpaceRecord struct{ record }

// SpaceAt returns a record below SpacesUsed.
func (f *File) SpaceAt(n int) SpaceRecord {
	return SpaceRecord{f.area(f.layout.Spaces+int64(n)*spaceBytes, spaceBytes)}
}

// SpacesUsed returns how many records were ever used. Further ones have no memory.
func (f *File) SpacesUsed() (n int) {
	f.Touch(func() { n = int(min(f.super.spaces.Load(), MaxSpaces)) })
	return n
}

// NextTurn starts a new turn and returns it.
func (r SpaceRecord) NextTurn() uint32 { return uint32(r.number().Add(1)) }

// Turn returns the current turn.
func (r SpaceRecord) Turn() uint32 { return uint32(r.number().Load()) }

// Used reports whether there is a space, damaged or not.
func (r SpaceRecord) Used() bool { return r.state().Load() != 0 }

// Remove removes the space of the record.
func (r SpaceRecord) Remove() { r.state().Store(0) }

// Write replaces the space of the record by an encoded one. NextTurn must have been called.
func (r SpaceRecord) Write(b []byte) { r.write(b) }

// Read returns the space of a record; false if there is none, or it is damaged.
func (r SpaceRecord) Read() (s pool.Spec, ok bool) {
	return s, json.Unmarshal(r.read(), &s) == nil
}

// EncodeSpec encodes a space for a record; false if it is too large.
func EncodeSpec(s *pool.Spec) (b []byte, fits bool) {
	b, err := json.Marshal(s)
	return b, err == nil && len(b) <= spaceBytes-recordHead
}

// FreeRecord returns the number of a record without a space.
func (f *File) FreeRecord() (n int, ok bool) {
	used := 0
	if !f.Touch(func() { used = int(min(f.super.spaces.Load(), MaxSpaces)) }) {
		return 0, false // which are used is unknown
	}
	for n := range used {
		free := false
		f.Touch(func() { free = !f.SpaceAt(n).Used() })
		if free {
			return n, true
		}
	}
	at := f.layout.Spaces + int64(used)*spaceBytes
	if used == MaxSpaces || !f.grow(at, at+spaceBytes) {
		return 0, false
	}
	return used, f.Touch(func() { f.super.spaces.Store(uint64(used) + 1) })
}

func (f *File) learned() record { return f.area(f.layout.Learned, learnedBytes) }

// SavedLearned returns what was saved; nil if there is nothing, or it cannot be read.
func (f *File) SavedLearned() (b []byte) {
	if !f.Touch(func() { b = f.learned().read() }) {
		return nil
	}
	return b
}

// SaveLearned saves what the policy learned, at most pool.MaxLearned bytes. It is lost if the
// process is killed meanwhile. One caller at a time.
func (f *File) SaveLearned(b []byte) {
	if len(b) <= pool.MaxLearned {
		f.Touch(func() { f.learned().write(b) })
	}
}

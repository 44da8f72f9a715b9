package arena

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"sync/atomic"
	"time"
	"unsafe"
)

// The superblock. The fixed part, written when the file is made:
//
//	0    magic (8 bytes)
//	8    format (uint32), 0 while the file is being made
//	12   CRC-32C of bytes 0 to 11 and 16 to 143
//	16   a random name of this file (16 bytes), its fingerprint
//	32   arena, 40 slab, 48 page (int64, bytes)
//	56   headers, 64 learned, 72 spaces, 80 slabs (int64, offsets)
//	96   when it was made (int64, ns since 1970)
//	104  the seed of its hash table (5 uint64)
//
// The variable part, each number in one store:
//
//	512  the process that has it (uint64)
//	520  start of that process (uint64, clock ticks since boot)
//	528  when it was last known to be in use (int64, ns since 1970)
//	536  bytes of the headers' area that have memory (int64)
//	544  records of the spaces' area that were ever used (uint64)
//	552  bytes of each copy of what the policy learned that have memory (uint64)
//	560  name of the machine or container of that process (64 bytes, zero-padded)
const (
	superMagic   = "kvagdram"
	superFixed   = 144
	superProcess = 512
	superBegan   = 520
	superAlive   = 528
	superGrown   = 536
	superSpaces  = 544
	superLearned = 552
	superHost    = 560
	SuperHostEnd = superHost + 64
)

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	le         = binary.LittleEndian

	errUnfinished = errors.New("its making was not finished")
	errBlank      = errors.New("its making had hardly begun")
	errForeign    = errors.New("not a pool's file")
)

// superblock is the fixed part.
type superblock struct {
	format uint32
	name   [16]byte
	Layout
	created int64     // ns since 1970
	seed    [5]uint64 // of the hash table

	// Set by decoding: how much of the sparse areas has memory.
	grown, spacesUsed, learnedUsed uint64
}

// encode returns the fixed part.
func (s *superblock) encode() []byte {
	b := make([]byte, superFixed)
	copy(b, superMagic)
	le.PutUint32(b[8:], s.format)
	copy(b[16:], s.name[:])
	for i, n := range [...]int64{s.arena, s.slab, s.page, s.Headers, s.Learned, s.Spaces, s.Slabs} {
		le.PutUint64(b[32+8*i:], uint64(n))
	}
	le.PutUint64(b[96:], uint64(s.created))
	for i, n := range s.seed {
		le.PutUint64(b[104+8*i:], n)
	}
	le.PutUint32(b[12:], superCheck(b))
	return b
}

func superCheck(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:12], castagnoli), castagnoli, b[16:superFixed])
}

// decodeSuper decodes the last superBytes of a file. If the format is unknown, only the format is
// valid.
func decodeSuper(b []byte) (s superblock, err error) {
	switch {
	case len(b) != superBytes:
		return s, errForeign
	case bytes.Count(b[:superFixed], []byte{0}) == superFixed:
		return s, errBlank
	case string(b[:8]) != superMagic:
		return s, errForeign
	}
	s.format = le.Uint32(b[8:])
	if s.format == 0 {
		return s, errUnfinished
	}
	if s.format != fileFormat {
		return s, nil
	}
	if le.Uint32(b[12:]) != superCheck(b) {
		return s, errors.New("its superblock is damaged")
	}
	copy(s.name[:], b[16:])
	s.arena, s.slab, s.page = int64(le.Uint64(b[32:])), int64(le.Uint64(b[40:])), int64(le.Uint64(b[48:]))
	s.Headers, s.Learned = int64(le.Uint64(b[56:])), int64(le.Uint64(b[64:]))
	s.Spaces, s.Slabs = int64(le.Uint64(b[72:])), int64(le.Uint64(b[80:]))
	s.created = int64(le.Uint64(b[96:]))
	for i := range s.seed {
		s.seed[i] = le.Uint64(b[104+8*i:])
	}
	s.grown, s.spacesUsed, s.learnedUsed = le.Uint64(b[superGrown:]), le.Uint64(b[superSpaces:]), le.Uint64(
		b[superLearned:],
	)
	return s, nil
}

// word returns a number of an area that is read and written atomically.
func word(b []byte, at int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&b[at]))
}

// sign writes this process into a superblock.
func sign(b []byte) {
	host, _ := os.Hostname() // without one it is not named
	field := b[superHost:SuperHostEnd]
	clear(field)
	copy(field[:len(field)-1], host)
	word(b, superBegan).Store(ProcessBegan(os.Getpid()))
	word(b, superProcess).Store(uint64(os.Getpid()))
	alive(b)
}

// alive writes that the file is in use now.
func alive(b []byte) { word(b, superAlive).Store(uint64(time.Now().UnixNano())) }

// signature is the process that last signed a superblock.
type signature struct {
	process int
	began   uint64
	host    string
}

func readSignature(b []byte) signature {
	host, _, _ := bytes.Cut(b[superHost:SuperHostEnd], []byte{0})
	return signature{
		process: int(le.Uint64(b[superProcess:])), began: le.Uint64(b[superBegan:]), host: string(host),
	}
}

// Bad pages of the arena in a file: words of the superblock's page, each 0 or a page number with a
// check. A word is written once, in one store, and stays until the file is made anew, when it gets
// other pages.
const (
	MaxBadPages = 256  // pages that a file remembers; with so many the pool is not healthy
	superBad    = 1024 // the first word
	superBadEnd = superBad + 8*MaxBadPages
)

func badWord(page int64) uint64 {
	w := uint64(page) << 8
	return w | slabCheck(w)
}

// MarkBad records a page of the arena that the next process must not use either. If no word is
// left, the next process has to find it again.
func (f *File) MarkBad(page int64) {
	if f == nil {
		return
	}
	f.Touch(func() {
		for at := superBad; at < superBadEnd; at += 8 {
			if w := word(f.whole, at); w.Load() == 0 {
				w.Store(badWord(page))
				return
			}
		}
	})
}

// BadPages returns the pages of the arena that earlier processes retired.
func (f *File) BadPages() (pages []int64) {
	l := &f.super.Layout
	f.Touch(func() {
		for at := superBad; at < superBadEnd; at += 8 {
			w := word(f.whole, at).Load()
			page := int64(w >> 8)
			if w == 0 || w != badWord(page) || page >= (l.arena+l.page-1)/l.page {
				continue
			}
			pages = append(pages, page)
		}
	})
	return pages
}

// Package transit holds what values are made of between memory and the tiers below it: the header
// that a value has in a store, and the staging memory in which it is copied.
package transit

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
)

// A value in a store is a header and the bytes of the shard:
//
//	 0  magic "kvT1"
//	 4  u32 LE  bytes of the shard
//	 8  u32 LE  checksum of the shard: pool.Sum from the Seed of its key in memory
//	12  u8      bytes of the node's name; 13 to 15: 0
//	16  32      name of the node that wrote it, padded with 0
//	48  u64 LE  when it was written, Unix seconds
//	56  u32 LE  0
//	60  u32 LE  checksum of bytes 0 to 59: pool.Sum from the Seed of the key in the store
//
// The first checksum binds the bytes to the block, the second one binds the header to its key: a
// value of another key, or of another epoch of the same space, does not verify. Another layout gets
// another magic; an unknown magic is a miss.

// Sizes in bytes: of a header, and of the longest node name in it.
const (
	HeaderBytes = 64
	MaxNode     = 32
)

var magic = [4]byte{'k', 'v', 'T', '1'}

// Reasons why a value is rejected.
var (
	errHeader  = errors.New("the header is damaged or of another version")
	errContent = errors.New("the content does not match its checksum")
	errStore   = errors.New("the store reports it as damaged")
)

// Header is the decoded header of a value.
type Header struct {
	Length uint32
	Sum    uint32
	Node   string
	When   uint64
}

// Seal writes the header of a value to be stored under key.
func (h *Header) Seal(key *pool.Key, p []byte) {
	clear(p[:HeaderBytes])
	copy(p, magic[:])
	binary.LittleEndian.PutUint32(p[4:], h.Length)
	binary.LittleEndian.PutUint32(p[8:], h.Sum)
	p[12] = uint8(copy(p[16:16+MaxNode], h.Node))
	binary.LittleEndian.PutUint64(p[48:], h.When)
	binary.LittleEndian.PutUint32(p[60:], pool.Sum(key.Seed(h.Length), p[:60]))
}

// unseal decodes and verifies the header of a value found under key, whose shard should have length
// bytes.
func unseal(key *pool.Key, p []byte, length uint32) (h Header, err error) {
	h = Header{Length: binary.LittleEndian.Uint32(p[4:]), Sum: binary.LittleEndian.Uint32(p[8:]),
		When: binary.LittleEndian.Uint64(p[48:])}
	if p[12] > MaxNode || h.Length != length {
		return h, errHeader
	}
	h.Node = string(p[16 : 16+p[12]])
	var again [HeaderBytes]byte // a valid header is exactly what Seal writes
	if h.Seal(key, again[:]); !bytes.Equal(again[:], p[:HeaderBytes]) {
		return h, errHeader
	}
	return h, nil
}

// Verify checks a value: its header against the key in the store, and its bytes against the key in
// memory. It returns the checksum of the bytes.
func Verify(stored, own *pool.Key, value []byte) (sum uint32, err error) {
	length := uint32(len(value) - HeaderBytes)
	h, err := unseal(stored, value, length)
	if err != nil {
		return 0, err
	}
	if sum = pool.Sum(own.Seed(length), value[HeaderBytes:]); sum != h.Sum {
		return 0, fmt.Errorf("written by %q: %w", h.Node, errContent)
	}
	return sum, nil
}

// DamageError returns the error for a value that its store found damaged, with its writer if known.
func DamageError(stored *pool.Key, value []byte) error {
	h, err := unseal(stored, value, uint32(len(value)-HeaderBytes))
	if err != nil {
		return errStore
	}
	return fmt.Errorf("written by %q: %w", h.Node, errStore)
}

// Unit is what extents of staging are rounded up and aligned to, bytes: a page, for direct I/O.
const Unit = 4096

// Staging is the memory for values between the arena and the tiers: a shared mapping, so that a
// store in another process can register it once. Reads from tiers may use all of it, writes half.
type Staging struct {
	base []byte
	fd   int

	mu struct {
		sync.Mutex
		free    []extent // by offset, never two adjacent
		written int64    // lent for writing
		closed  bool
	}
	room *sync.Cond
}

type extent struct{ off, len int64 }

// OpenStaging maps staging of a size in bytes, a multiple of Unit.
func OpenStaging(bytes int64) (*Staging, error) {
	fd, err := unix.MemfdCreate("kvagent-staging", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("tier: staging: memfd: %w", err)
	}
	if err := unix.Ftruncate(fd, bytes); err != nil {
		return nil, errors.Join(fmt.Errorf("tier: staging of %d bytes: %w", bytes, err), unix.Close(fd))
	}
	base, err := unix.Mmap(fd, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("tier: map staging of %d bytes: %w", bytes, err), unix.Close(fd))
	}
	s := &Staging{base: base, fd: fd}
	s.room = sync.NewCond(&s.mu)
	s.mu.free = []extent{{0, bytes}}
	return s, nil
}

// Memory returns the mapping and a descriptor to map it from; both are valid until Close.
func (s *Staging) Memory() (base []byte, fd int) { return s.base, s.fd }

// Close unmaps the staging. No loan may be in use.
func (s *Staging) Close() error {
	s.End()
	return errors.Join(unix.Munmap(s.base), unix.Close(s.fd))
}

// End ends lending, and wakes the callers of Wait.
func (s *Staging) End() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.closed = true
	s.room.Broadcast()
}

// RoundUp returns the size of the extent that holds n bytes.
func RoundUp(n int64) int64 { return (n + Unit - 1) &^ (Unit - 1) }

// Loan is a lent extent of staging; size 0 is none.
type Loan struct {
	Bytes     []byte
	off, Size int64
	writing   bool
}

// Take lends n bytes, or nothing if there is no room. Writers may have half of staging.
func (s *Staging) Take(n int64, writing bool) Loan {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.takeLocked(n, writing)
}

// Wait lends n bytes to a reader without other loans, and waits for room. It returns nothing if
// staging is too small or closed.
func (s *Staging) Wait(n int64) Loan {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.mu.closed && RoundUp(n) <= int64(len(s.base)) {
		if l := s.takeLocked(n, false); l.Size > 0 {
			return l
		}
		s.room.Wait()
	}
	return Loan{}
}

func (s *Staging) takeLocked(n int64, writing bool) Loan {
	size := RoundUp(n)
	if s.mu.closed || writing && s.mu.written+size > int64(len(s.base))/2 {
		return Loan{}
	}
	for i := range s.mu.free {
		f := &s.mu.free[i]
		if f.len < size {
			continue
		}
		l := Loan{Bytes: s.base[f.off : f.off+n : f.off+size], off: f.off, Size: size, writing: writing}
		f.off, f.len = f.off+size, f.len-size
		if f.len == 0 {
			s.mu.free = slices.Delete(s.mu.free, i, i+1)
		}
		if writing {
			s.mu.written += size
		}
		return l
	}
	return Loan{}
}

// Return takes a loan back.
func (s *Staging) Return(l Loan) {
	if l.Size == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.writing {
		s.mu.written -= l.Size
	}
	free := s.mu.free
	i, _ := slices.BinarySearchFunc(free, l.off, func(f extent, off int64) int { return int(f.off - off) })
	free = slices.Insert(free, i, extent{l.off, l.Size})
	if i+1 < len(free) && l.off+l.Size == free[i+1].off {
		free[i].len += free[i+1].len
		free = slices.Delete(free, i+1, i+2)
	}
	if i > 0 && free[i-1].off+free[i-1].len == l.off {
		free[i-1].len += free[i].len
		free = slices.Delete(free, i, i+1)
	}
	s.mu.free = free
	s.room.Broadcast()
}

// Size returns the size of the staging in bytes.
func (s *Staging) Size() int64 { return int64(len(s.base)) }

// Lent returns the bytes that are lent.
func (s *Staging) Lent() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := int64(len(s.base))
	for _, f := range s.mu.free {
		n -= f.len
	}
	return n
}

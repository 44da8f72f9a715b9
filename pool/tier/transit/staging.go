package transit

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// Unit is what every piece of staging is rounded up to and aligned to, bytes: a page, so that direct I/O takes it as it is.
const Unit = 4096

// MinStaging and MaxStaging bound the size of Staging, bytes.
const (
	MinStaging = 64 << 10
	MaxStaging = 64 << 30
)

// Staging is the memory that values lie in on their way between the arena and the tiers: a shared mapping, so that a store in another process can
// register it once. Reading from tiers may use all of it, writing half.
type Staging struct {
	base []byte
	fd   int

	mu struct {
		sync.Mutex
		free    []piece // by offset, never two adjacent
		written int64   // bytes out for writing
		closed  bool
	}
	room *sync.Cond
}

type piece struct{ off, len int64 }

// OpenStaging maps staging of a size in bytes.
func OpenStaging(bytes int64) (*Staging, error) {
	if bytes < MinStaging || bytes > MaxStaging {
		return nil, fmt.Errorf("tier: staging of %d bytes, allowed: %d to %d", bytes, int64(MinStaging), int64(MaxStaging))
	}
	bytes = bytes &^ (Unit - 1)
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
	s.mu.free = []piece{{0, bytes}}
	return s, nil
}

// Memory is the mapping and the descriptor it can be mapped from; both end with Close.
func (s *Staging) Memory() (base []byte, fd int) { return s.base, s.fd }

// Close unmaps. Nobody may use it any more.
func (s *Staging) Close() error {
	s.End()
	return errors.Join(unix.Munmap(s.base), unix.Close(s.fd))
}

// End lends nothing any more, and wakes those who wait.
func (s *Staging) End() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.closed = true
	s.room.Broadcast()
}

// RoundUp is the size of the piece that holds n bytes.
func RoundUp(n int64) int64 { return (n + Unit - 1) &^ (Unit - 1) }

// Loan is a piece of staging that somebody has; size 0: none.
type Loan struct {
	Bytes     []byte
	off, Size int64
	writing   bool
}

// Take lends n bytes, or nothing if there is no room. Writers have half of staging at most.
func (s *Staging) Take(n int64, writing bool) Loan {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.takeLocked(n, writing)
}

// Wait lends n bytes to a reader, who has nothing yet, and waits for others to give theirs back; nothing if staging is too small or closed.
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

// Give takes a loan back.
func (s *Staging) Give(l Loan) {
	if l.Size == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.writing {
		s.mu.written -= l.Size
	}
	free := s.mu.free
	i, _ := slices.BinarySearchFunc(free, l.off, func(f piece, off int64) int { return int(f.off - off) })
	free = slices.Insert(free, i, piece{l.off, l.Size})
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

// Size is all of it, bytes.
func (s *Staging) Size() int64 { return int64(len(s.base)) }

// Lent is the bytes that are lent.
func (s *Staging) Lent() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := int64(len(s.base))
	for _, f := range s.mu.free {
		n -= f.len
	}
	return n
}

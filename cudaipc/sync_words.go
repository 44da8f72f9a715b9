package cudaipc

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/kvagent/kvagent/pagefault"
)

// stepWord, event and revoke words lie in memory that two processes share. They are read and
// written only by atomic operations, which on the machines Go runs on order the plain writes of the
// bytes around them too. The words are little-endian; so are the machines this device is built for
// (amd64, arm64).

// Word64 returns a word of 8 bytes of shared memory.
func Word64(mem []byte, off uint64) *uint64 {
	return (*uint64)(unsafe.Pointer(&mem[off : off+8][0]))
}

// Word32 returns a word of 4 bytes of shared memory.
func Word32(mem []byte, off uint64) *uint32 {
	return (*uint32)(unsafe.Pointer(&mem[off : off+4][0]))
}

// fired reports whether the event whose cell begins at off has fired. It loads the fired count
// first, so that an event recorded again in between can only look pending, never fired too early.
func fired(mem []byte, off uint64) bool {
	done := atomic.LoadUint64(Word64(mem, off+8))
	return done >= atomic.LoadUint64(Word64(mem, off))
}

// check checks the places of a peer's words, with event cells of cell bytes, against the size of
// their region.
func (s *Sync) check(size, cell uint64) error {
	if err := words("step", s.StepOff, 1, 8, 8, size); err != nil {
		return err
	}
	if err := words("events", s.EventsOff, s.Events, cell, 8, size); err != nil {
		return err
	}
	return words("revoke", s.RevokeOff, s.Revokes, 4, 4, size)
}

func words(name string, off uint64, n uint32, each, align, size uint64) error {
	if off%align != 0 {
		return fmt.Errorf("sync: %s words at %d: not a multiple of %d: %w", name, off, align, ErrRange)
	}
	if length := uint64(n) * each; off > size || length > size-off {
		return fmt.Errorf("sync: %d %s words at %d: the region has %d bytes: %w", n, name, off, size, ErrRange)
	}
	return nil
}

// SetWord writes a word of the peer's sync region, whose pages may vanish at any time.
func (p *Peer) SetWord(off, value uint64) error {
	if size := uint64(len(p.Words)); off%8 != 0 || off > size || size-off < 8 {
		return fmt.Errorf("peer %d: word of 8 bytes at %d of the sync region, which has %d: %w", p.ID, off, size,
			ErrRange)
	}
	err := pagefault.Guard(p.Words, p.Words, func() { atomic.StoreUint64(Word64(p.Words, off), value) })
	if err != nil {
		return fmt.Errorf("peer %d: sync words: %w: %w", p.ID, err, ErrPeer)
	}
	return nil
}

// Poll answers a wait from the words of a peer, including the event.
func (p *Peer) Poll(w *Wait, s *State) error {
	if err := p.CheckWait(w); err != nil {
		return err
	}
	*s = State{Fired: true}
	if p.Words == nil {
		return nil
	}
	if err := p.PollWords(w, s); err != nil {
		return err
	}
	if !s.Fired && p.FireOnDeath && p.Dead() {
		s.Fired = true
	}
	return nil
}

// CheckWait checks a wait against the counts of the peer's events and revocation words.
func (p *Peer) CheckWait(w *Wait) error {
	if (w.Event != None && w.Event >= p.sync.Events) || (w.Revoke != None && w.Revoke >= p.sync.Revokes) {
		return fmt.Errorf("event %d of %d, revocation word %d of %d: %w",
			w.Event, p.sync.Events, w.Revoke, p.sync.Revokes, ErrRange)
	}
	return nil
}

// PollWords reads a peer's words. Their pages may vanish at any time, which is an error.
func (p *Peer) PollWords(w *Wait, s *State) error {
	err := pagefault.Guard(p.Words, p.Words, func() { p.read(w, s) })
	if err != nil {
		return fmt.Errorf("peer %d: sync words: %w: %w", p.ID, err, ErrPeer)
	}
	return nil
}

// read loads the event before the step word: an event seen as fired then proves the step that was
// written before it.
func (p *Peer) read(w *Wait, s *State) {
	if w.Event != None {
		s.Fired = fired(p.Words, p.sync.EventsOff+uint64(w.Event)*EventCell)
	}
	s.Step = atomic.LoadUint64(Word64(p.Words, p.sync.StepOff))
	if w.Revoke != None {
		s.Revoked = atomic.LoadUint32(Word32(p.Words, p.sync.RevokeOff+uint64(w.Revoke)*4)) != 0
	}
}

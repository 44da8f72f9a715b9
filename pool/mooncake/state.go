package mooncake

import (
	"sync/atomic"

	"github.com/kvagent/kvagent/pool"
)

// State of the store.
type State uint8

// The states.
const (
	StateOK   State = iota
	StateFull       // the segments have no room, and Mooncake evicts nothing for us: blocks are read, and none is stored
	StateLost       // no master, or no helper
)

func (s State) String() string { return [...]string{"ok", "full", "lost"}[s] }

type counts struct {
	starts, deaths, kills, errors, full, corrupt, failed, large, inPlace, copied atomic.Uint64
}

// Counters of a store, since it was opened.
type Counters struct {
	Starts  uint64 // of helpers
	Deaths  uint64 // of helpers that had connected, however they came
	Kills   uint64 // helpers killed because they hung, or worked in the arena when a deadline came
	Errors  uint64 // requests that Mooncake did not answer
	Full    uint64 // blocks refused because there was no room
	Corrupt uint64 // blocks that did not verify, and were deleted
	Failed  uint64 // blocks that Mooncake refused for another reason
	Large   uint64 // blocks outside of the arena too large for the bounce memory
	InPlace uint64 // bytes put and got in the arena
	Copied  uint64 // bytes put and got through the bounce memory
}

// Counters may be called from any goroutine.
func (s *Store) Counters() Counters {
	c := &s.count
	return Counters{
		Starts: c.starts.Load(), Deaths: c.deaths.Load(), Kills: c.kills.Load(), Errors: c.errors.Load(), Full: c.full.Load(),
		Corrupt: c.corrupt.Load(), Failed: c.failed.Load(), Large: c.large.Load(), InPlace: c.inPlace.Load(), Copied: c.copied.Load(),
	}
}

// State is the state now.
func (s *Store) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// turn changes the state.
func (s *Store) turn(to State, reason error) {
	s.mu.Lock()
	from := s.state
	s.state = to
	s.mu.Unlock()
	if from != to && s.o.OnState != nil {
		s.o.OnState(from, to, reason)
	}
}

// turnOf changes the state because of what a helper said, unless that is not the helper any more.
func (s *Store) turnOf(h *helper, to State, reason error) {
	s.mu.Lock()
	from, current := s.state, s.helper == h
	if current {
		s.state = to
	}
	s.mu.Unlock()
	if current && from != to && s.o.OnState != nil {
		s.o.OnState(from, to, reason)
	}
}

// answered is called when the master said something. Only a put shows that there is room again.
func (s *Store) answered(h *helper) {
	if s.State() == StateLost {
		s.turnOf(h, StateOK, nil)
	}
}

// Usage is what this store put since it was opened, less what it deleted: Mooncake evicts without telling.
func (s *Store) Usage() pool.Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return pool.Usage{Items: max(s.stock.items, 0), Bytes: max(s.stock.bytes, 0)}
}

func (s *Store) keep(items, bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stock.items += items
	s.stock.bytes += bytes
}

// Mooncake's errors that say more than that something failed.
const (
	codeNoRoom      = -200
	codeWrongLength = -600
	codeNotReady    = -703
	codeNotFound    = -704
	codeExists      = -705
	codeGone        = -712
	codeQuota       = -1700
)

// silent says whether a code is of a master or a node that did not answer.
func silent(code int64) bool { return code == -800 || code <= -900 && code > -1000 }

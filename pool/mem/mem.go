// Package mem is a pool in plain maps and slices under one mutex: slow, simple, and the oracle
// that other pools are compared with. It implements the same three interfaces under the same
// contract.
package mem

import (
	"container/list"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
)

// Unit is the unit to which slots are rounded up, bytes.
const Unit = 1024

// PartialAge is how long an entry may lack shards that no job is writing before it is reclaimed.
const PartialAge = 30 * time.Second

// Options of a pool.
type Options struct {
	Bytes int64            // size of the arena; rounded up to whole pages
	Clock func() time.Time // nil is time.Now
}

// Pool implements pool.Index, pool.Slots and pool.Spaces.
type Pool struct {
	arena []byte
	fd    int

	mu       sync.Mutex
	now      func() time.Time
	closed   bool
	spaces   []*space
	byPrint  map[pool.Fingerprint]pool.SpaceID
	entries  map[entryKey]*entry
	refs     map[pool.Ref]*entry // every entry that holds slots, including dropped ones
	lastRef  pool.Ref
	recent   *list.List // visible entries, most recently used first
	free     extents
	pressure func(int64) bool
	stats    pool.Stats
}

type space struct {
	spec   pool.Spec
	epoch  uint32
	closed bool
}

type entryKey struct {
	space pool.SpaceID
	group uint8
	hash  pool.Hash
}

type entry struct {
	key      entryKey
	ref      pool.Ref
	shards   []shard
	parent   *entry
	children map[*entry]struct{}
	place    *list.Element // in recent, while visible and not dropped
	pins     int
	dropped  bool
	idle     time.Time // when the last writer of a partial entry left
}

type shard struct {
	off              int64
	len, sum         uint32
	present, writing bool
}

var (
	_ pool.Index  = (*Pool)(nil)
	_ pool.Slots  = (*Pool)(nil)
	_ pool.Spaces = (*Pool)(nil)
)

// Open makes a pool on a memfd of its own.
func Open(o Options) (*Pool, error) {
	if o.Bytes <= 0 {
		return nil, fmt.Errorf("mem: Bytes is %d, must be above 0", o.Bytes)
	}
	size := (o.Bytes + 4095) &^ 4095
	fd, arena, err := mapArena(size)
	if err != nil {
		return nil, err
	}
	p := &Pool{
		arena: arena, fd: fd, now: o.Clock,
		byPrint: map[pool.Fingerprint]pool.SpaceID{}, entries: map[entryKey]*entry{}, refs: map[pool.Ref]*entry{},
		recent: list.New(), free: extents{{0, size}},
	}
	if p.now == nil {
		p.now = time.Now
	}
	p.stats.Capacity, p.stats.Ready = size, size
	return p, nil
}

func mapArena(size int64) (int, []byte, error) {
	fd, err := unix.MemfdCreate("kvagent-mem", unix.MFD_CLOEXEC)
	if err != nil {
		return -1, nil, fmt.Errorf("mem: memfd: %w", err)
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		return -1, nil, errors.Join(fmt.Errorf("mem: arena of %d bytes: %w", size, err), unix.Close(fd))
	}
	arena, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return -1, nil, errors.Join(fmt.Errorf("mem: map arena of %d bytes: %w", size, err), unix.Close(fd))
	}
	return fd, arena, nil
}

var _ pool.Mapped = (*Pool)(nil)

// Arena returns the memory that the slots lie in, and the descriptor from which it can be mapped.
// Both are the pool's and end with Close.
func (p *Pool) Arena() (base []byte, fd int) { return p.arena, p.fd }

// Close frees the arena. No slot may be in use and no method may be running.
func (p *Pool) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return pool.ErrClosed
	}
	p.closed = true
	return errors.Join(unix.Munmap(p.arena), unix.Close(p.fd))
}

// Check verifies all invariants and returns the first violation. It is slow, and meant for tests.
func (p *Pool) Check() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var used int64
	for ref, e := range p.refs {
		used += e.bytes()
		if e.ref != ref {
			return fmt.Errorf("entry %d is found as %d", e.ref, ref)
		}
		if !e.dropped && p.entries[e.key] != e {
			return fmt.Errorf("entry %d is not found by its key", ref)
		}
		if e.dropped && !e.held() {
			return fmt.Errorf("entry %d is dropped and not held, and is still there", ref)
		}
		if (e.place != nil) != (!e.dropped && e.count() == len(e.shards)) {
			return fmt.Errorf("entry %d visible with %d of %d shards", ref, e.count(), len(e.shards))
		}
		if e.parent != nil && (e.parent.dropped || p.refs[e.parent.ref] != e.parent) {
			return fmt.Errorf("suffix kept when its prefix goes: the parent of entry %d is not stored", ref)
		}
	}
	for _, x := range p.free {
		used += x.len
	}
	if used != p.stats.Capacity {
		return fmt.Errorf("%d bytes are used or free, of %d", used, p.stats.Capacity)
	}
	return nil
}

package tier

import (
	"hash/maphash"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// existsCache remembers for a while which entries a store has and lacks. It has a fixed number of
// cells; a new entry replaces the one of its set that expires first. It identifies entries by a
// 64-bit hash with a secret seed; a collision costs a fetch that finds nothing.
type existsCache struct {
	mu    sync.Mutex
	cells []cell
}

// cell is one entry; it is free if until is 0.
type cell struct {
	digest uint64
	until  int64 // ns of the pool's clock; the lowest bit is set if the entry exists
}

// ways is the number of cells of a set.
const ways = 4

// newKnown returns a cache of so many cells, a power of two.
func newExistsCache(entries int) existsCache { return existsCache{cells: make([]cell, entries)} }

// set returns the cells that an entry may be in.
func (k *existsCache) set(digest uint64) []cell {
	i := int(digest>>32) & (len(k.cells)/ways - 1) * ways
	return k.cells[i : i+ways]
}

// get reports whether the cache has an entry, and if so whether the entry exists.
func (k *existsCache) get(digest uint64, now time.Time) (exists, cached bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.set(digest) {
		if c.digest == digest && c.until > now.UnixNano() {
			return c.until&1 == 1, true
		}
	}
	return false, false
}

// absentUntil returns until when an entry is believed not to exist; zero if it is not.
func (k *existsCache) absentUntil(digest uint64, now time.Time) time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.set(digest) {
		if c.digest == digest && c.until > now.UnixNano() && c.until&1 == 0 {
			return time.Unix(0, c.until)
		}
	}
	return time.Time{}
}

// put records until when an entry is believed to exist or not.
func (k *existsCache) put(digest uint64, there bool, until time.Time) {
	at := until.UnixNano() &^ 1
	if there {
		at |= 1
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	set := k.set(digest)
	victim := &set[0]
	for i := range set {
		c := &set[i]
		if c.digest == digest {
			victim = c
			break
		}
		if c.until < victim.until {
			victim = c
		}
	}
	*victim = cell{digest, at}
}

// forget removes an entry.
func (k *existsCache) forget(digest uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, c := range k.set(digest) {
		if c.digest == digest {
			k.set(digest)[i] = cell{}
		}
	}
}

var digestSeed = maphash.MakeSeed()

// digest returns the identity of an entry in caches and questions.
func (l *life) digest(group uint8, hash []byte) uint64 {
	var b [16 + 2 + pool.MaxHashLen]byte
	copy(b[:], l.stored[:])
	b[16], b[17] = group, uint8(len(hash))
	return maphash.Bytes(digestSeed, b[:18+copy(b[18:], hash)])
}

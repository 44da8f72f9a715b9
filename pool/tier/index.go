package tier

import (
	"context"
	"hash/maphash"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// stride is how many entries one step examines.
const stride = 64

// Where an entry is, other than the number of a level.
const (
	nowhere  = -1
	inMemory = -2
)

// scratch is the working memory of one call.
type scratch struct {
	where   []int8 // of the entries from the first that memory lacks on
	present [stride]bool
	keys    []pool.Key
	status  [2 * stride]pool.Status
	absent  [stride]int16
}

var scratchPool = sync.Pool{New: func() any { return &scratch{keys: make([]pool.Key, 0, 2*stride)} }}

// Prefix implements pool.Index: memory's prefix, continued by entries that memory or a tier is
// believed to have.
func (p *Pool) Prefix(s pool.SpaceID, group uint8, h pool.Hashes) int {
	n := p.Memory.Prefix(s, group, h)
	if p.using && n > 0 {
		p.used(s, group, h.Slice(0, n))
	}
	if n == h.N || len(p.levels) == 0 {
		return n
	}
	w := scratchPool.Get().(*scratch)
	defer scratchPool.Put(w)
	end := p.locate(w, s, group, &h, n)
	for i := n; i < end; i++ { // entries in memory after a gap count as used too
		if w.where[i-n] != inMemory {
			continue
		}
		to := runEnd(w.where, i-n, end-n) + n
		p.Memory.Prefix(s, group, h.Slice(i, to))
		i = to
	}
	return end
}

// runEnd returns the end of the run in memory that begins at i.
func runEnd(where []int8, i, end int) int {
	for i < end && where[i] == inMemory {
		i++
	}
	return i
}

// Exists implements pool.Index.
func (p *Pool) Exists(s pool.SpaceID, group uint8, h pool.Hashes, present []bool) {
	p.Memory.Exists(s, group, h, present)
	sp := p.spaces.get(s)
	g := sp.group(group)
	if len(p.levels) == 0 || g == nil {
		return
	}
	w := scratchPool.Get().(*scratch)
	defer scratchPool.Put(w)
	now := sp.now.Load()
	for from := 0; from < h.N; from += stride {
		to := min(from+stride, h.N)
		w.where = append(w.where[:0], noneThere[:to-from]...)
		for i := range w.where {
			if present[from+i] {
				w.where[i] = inMemory
			}
		}
		p.markInTiers(w, sp, now, group, &h, from, w.where)
		for i := range w.where {
			present[from+i] = w.where[i] != nowhere
		}
	}
}

// locate finds where the entries from n on are, up to the first that is nowhere or not worth
// loading, and returns the end of them.
func (p *Pool) locate(w *scratch, s pool.SpaceID, group uint8, h *pool.Hashes, n int) (end int) {
	w.where = w.where[:0]
	sp := p.spaces.get(s)
	g := sp.group(group)
	if g == nil {
		return n
	}
	now := sp.now.Load()
	step := 1 // most chains end here
	for from := n; from < h.N; {
		to := min(from+step, h.N)
		w.where = append(w.where, noneThere[:to-from]...)
		part := w.where[from-n:]
		p.markInMemory(w, s, group, h, from, part)
		p.markInTiers(w, sp, now, group, h, from, part)
		for i := range part {
			if part[i] == nowhere {
				return from + i
			}
		}
		from, step = to, stride
	}
	return h.N
}

// noneThere is entries that are nowhere.
var noneThere = func() (all [stride]int8) {
	for i := range all {
		all[i] = nowhere
	}
	return all
}()

// markInMemory marks the entries, from entry from of the chain on, that memory has.
func (p *Pool) markInMemory(w *scratch, s pool.SpaceID, group uint8, h *pool.Hashes, from int, where []int8) {
	present := w.present[:len(where)]
	p.Memory.Exists(s, group, h.Slice(from, from+len(where)), present)
	for i, there := range present {
		if there {
			where[i] = inMemory
		}
	}
}

// markInTiers marks the entries that are nowhere yet and that tiers are believed to have. where has
// at most stride entries.
func (p *Pool) markInTiers(
	w *scratch, sp *space, now *era, group uint8, h *pool.Hashes, from int, where []int8,
) {
	if now.epoch == 0 || now.off {
		return
	}
	for _, l := range p.levels {
		if !l.up() {
			continue
		}
		if l.Local {
			l.markInLocal(w, sp, now, group, h, from, where)
			continue
		}
		clock := p.now()
		for i := range where {
			if where[i] != nowhere {
				continue
			}
			if there, _ := l.exists.get(now.digest(group, h.At(from+i)), clock); there {
				where[i] = int8(l.number)
			}
		}
	}
}

// markInLocal marks the entries that are nowhere yet and that a local store has.
func (l *level) markInLocal(w *scratch, sp *space, now *era, group uint8, h *pool.Hashes, from int, where []int8) {
	w.keys = w.keys[:0]
	n, per := 0, min(sp.spec.Shards, 2)
	for i := range where {
		if where[i] != nowhere {
			continue
		}
		k := entryKey{group: group, hash: pool.MakeHash(h.At(from + i))}
		w.keys = now.boundaryKeys(&k, sp.spec.Shards, w.keys)
		w.absent[n] = int16(i)
		n++
	}
	if n == 0 {
		return
	}
	status := w.status[:len(w.keys)]
	for i := range status {
		status[i] = pool.Missing
	}
	if err := l.Store.Exists(context.Background(), w.keys, status); err != nil {
		l.countResult(context.Background(), asks, err)
		return
	}
	for i := range n {
		if has(status[i*per : (i+1)*per]) {
			where[w.absent[i]] = int8(l.number)
		}
	}
}

// existsCache remembers for a while which entries a store has and lacks. It has a fixed number of
// places; a new entry replaces the one of its set that expires first. It identifies entries by a
// 64-bit hash with a secret seed; a collision costs a fetch that finds nothing.
type existsCache struct {
	mu     sync.Mutex
	places []place
}

// place is one entry; it is free if until is 0.
type place struct {
	digest uint64
	until  int64 // ns of the pool's clock; the lowest bit is set if the entry exists
}

// ways is the number of places of a set.
const ways = 4

// newExistsCache returns a cache of so many places, a power of two.
func newExistsCache(entries int) existsCache { return existsCache{places: make([]place, entries)} }

// set returns the places that an entry may be in.
func (k *existsCache) set(digest uint64) []place {
	i := int(digest>>32) & (len(k.places)/ways - 1) * ways
	return k.places[i : i+ways]
}

// get returns until when an entry is believed to exist or not; zero if it is not cached.
func (k *existsCache) get(digest uint64, now time.Time) (exists bool, until time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.set(digest) {
		if c.digest == digest && c.until > now.UnixNano() {
			return c.until&1 == 1, time.Unix(0, c.until)
		}
	}
	return false, time.Time{}
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
	*victim = place{digest, at}
}

var digestSeed = maphash.MakeSeed()

// digest returns the identity of an entry in caches and questions.
func (e *era) digest(group uint8, hash []byte) uint64 {
	var b [16 + 2 + pool.MaxHashLen]byte
	copy(b[:], e.stored[:])
	b[16], b[17] = group, uint8(len(hash))
	return maphash.Bytes(digestSeed, b[:18+copy(b[18:], hash)])
}

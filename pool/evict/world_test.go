package evict_test

import (
	"math/rand/v2"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/advisor"
)

// world plays a pool with random chains, pins and half-written entries, and checks the contract of
// a policy.
type world struct {
	t      *testing.T
	rand   *rand.Rand
	policy advisor.Policy
	parent map[uint32]uint32
	kids   map[uint32][]uint32
	held   map[uint32]bool
	prints map[uint32]uint64
	kind   map[uint32]uint8
	free   []uint32
	now    int64
}

const worldEntries = 600

func newWorld(t *testing.T, p advisor.Policy, seed uint64) *world {
	w := &world{
		t: t, policy: p, rand: rand.New(rand.NewPCG(seed, 3)), now: 1,
		parent: map[uint32]uint32{}, kids: map[uint32][]uint32{}, held: map[uint32]bool{},
		prints: map[uint32]uint64{}, kind: map[uint32]uint8{},
	}
	for e := uint32(worldEntries); e > 0; e-- {
		w.free = append(w.free, e)
	}
	return w
}

// Child implements pool.View.
func (w *world) Child(e uint32) uint32 {
	if k := w.kids[e]; len(k) > 0 {
		return k[len(k)-1]
	}
	return 0
}

// Held implements pool.View.
func (w *world) Held(e uint32) bool { return w.held[e] }

func (w *world) stored() (all []uint32) {
	for e := uint32(1); e <= worldEntries; e++ {
		if _, ok := w.prints[e]; ok {
			all = append(all, e)
		}
	}
	return all
}

// grow stores a run of blocks after a random one.
func (w *world) grow() {
	var before uint32
	kind := uint8(w.rand.IntN(3))
	if all := w.stored(); len(all) > 0 && w.rand.IntN(3) > 0 {
		before = all[w.rand.IntN(len(all))]
		kind = w.kind[before]
	}
	in := pool.Insertion{Now: w.now, BlockTokens: 128, Kind: kind, Parent: before}
	for range min(1+w.rand.IntN(12), len(w.free)) {
		e := w.free[len(w.free)-1]
		w.free = w.free[:len(w.free)-1]
		w.prints[e], w.kind[e] = w.rand.Uint64(), kind
		if before != 0 {
			w.parent[e] = before
			w.kids[before] = append(w.kids[before], e)
		}
		before = e
		in.Entries, in.Prints = append(in.Entries, e), append(in.Prints, w.prints[e])
	}
	w.policy.Insert(&in)
}

// look uses the chain down to a random entry, and some blocks that are not stored.
func (w *world) look() {
	all := w.stored()
	if len(all) == 0 {
		return
	}
	u := pool.Use{Now: w.now, BlockTokens: 128}
	for e := all[w.rand.IntN(len(all))]; e != 0; e = w.parent[e] {
		u.Entries = append([]uint32{e}, u.Entries...)
		u.Prints = append([]uint64{w.prints[e]}, u.Prints...)
	}
	for range w.rand.IntN(4) {
		u.Prints = append(u.Prints, w.rand.Uint64())
	}
	w.policy.Access(&u)
}

// evict asks for a victim of some kinds and checks the promises.
func (w *world) evict() {
	kinds := uint64(1 + w.rand.IntN(7))
	e := w.policy.Victim(w.now, kinds, 0, w)
	if e == 0 {
		if left := w.evictable(kinds); left > 0 {
			w.t.Errorf("no victim, and %d entries could go", left)
		}
		return
	}
	switch {
	case len(w.kids[e]) > 0:
		w.t.Fatalf("hole in a chain: the victim %d has children %v", e, w.kids[e])
	case w.held[e]:
		w.t.Fatalf("evicts a pinned entry: %d", e)
	case kinds>>w.kind[e]&1 == 0:
		w.t.Fatalf("victim %d is of kind %d, asked for %b", e, w.kind[e], kinds)
	}
	w.remove(e)
}

func (w *world) evictable(kinds uint64) (n int) {
	for _, e := range w.stored() {
		if len(w.kids[e]) == 0 && !w.held[e] && kinds>>w.kind[e]&1 != 0 {
			n++
		}
	}
	return n
}

func (w *world) remove(e uint32) {
	if up := w.parent[e]; up != 0 {
		k := w.kids[up]
		for i := range k {
			if k[i] == e {
				w.kids[up] = append(k[:i:i], k[i+1:]...)
				break
			}
		}
	}
	for _, kid := range w.kids[e] {
		delete(w.parent, kid)
	}
	delete(w.parent, e)
	delete(w.kids, e)
	delete(w.prints, e)
	delete(w.held, e)
	w.policy.Remove([]uint32{e})
	w.free = append(w.free, e)
}

func (w *world) step() {
	w.now += int64(w.rand.ExpFloat64() * 2e9)
	all := w.stored()
	switch w.rand.IntN(8) {
	case 0, 1:
		w.grow()
	case 2, 3:
		w.look()
	case 4:
		if len(all) > 0 {
			e := all[w.rand.IntN(len(all))]
			w.held[e] = !w.held[e]
		}
	case 5:
		if len(all) > 0 && w.rand.IntN(10) == 0 { // dropped as corrupt
			w.remove(all[w.rand.IntN(len(all))])
		}
	default:
		w.evict()
	}
}

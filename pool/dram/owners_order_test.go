package dram

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// tree is a pool's view: the child and the state of each entry.
type tree struct {
	children map[uint32]uint32
	held     map[uint32]bool
}

func (v *tree) Child(e uint32) uint32 { return v.children[e] }
func (v *tree) Held(e uint32) bool    { return v.held[e] }

// table has the entries 1 to n of one owner, the first of which is the oldest.
func table(t *testing.T, n uint32) (*ownerTable, pool.Owner) {
	all, err := newOwners(int(n) + 2)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { all.links.Close() })
	o, err := all.open("one")
	if err != nil {
		t.Fatal(err)
	}
	for e := uint32(1); e <= n; e++ {
		all.own(e, o, 1, 0)
	}
	return &all, o
}

// TestVictimPassesOverEachEntryOnce searches among entries that are all held, or have a child of
// somebody else's: it does not search them again and again until its steps are used.
func TestVictimPassesOverEachEntryOnce(t *testing.T) {
	const n, most = 9, 10_000
	all, o := table(t, n)
	v := &tree{children: map[uint32]uint32{}, held: map[uint32]bool{}}
	for e := uint32(1); e <= n; e++ {
		v.held[e] = e%2 == 0
		v.children[e] = n + 1
	}
	steps := most
	if e := all.victim(o, v, &steps); e != 0 || most-steps > n*usedSteps {
		t.Errorf("entry %d after %d steps, want none after %d at most", e, most-steps, n*usedSteps)
	}
	delete(v.children, 5)
	if e := all.victim(o, v, &steps); e != 5 {
		t.Errorf("entry %d, want 5, which has no child any more", e)
	}
}

// TestVictimOfALongChain searches among the entries of one chain, the start of which is the oldest.
func TestVictimOfALongChain(t *testing.T) {
	const n = 3*maxPath + 7
	all, o := table(t, n)
	v := &tree{children: map[uint32]uint32{}}
	for e := uint32(1); e < n; e++ {
		v.children[e] = e + 1
	}
	e, calls := uint32(0), 0
	for ; e == 0 && calls < 20; calls++ {
		steps := maxPath
		e = all.victim(o, v, &steps)
	}
	if e != n || calls > 16 {
		t.Errorf("entry %d after %d calls, want %d after 16 at most", e, calls, n)
	}
	steps := 0
	if again := all.victim(o, v, &steps); again != e {
		t.Errorf("entry %d without a step, want %d again", again, e)
	}
}

// TestOrderOfManyOwners gives, uses and frees entries of several owners at random, whose names are
// given away now and then, and compares the orders with what the entries say after each step.
func TestOrderOfManyOwners(t *testing.T) {
	const entries, bytes = 60, 7
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	all, err := newOwners(entries + 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { all.links.Close() })
	owned, left := map[uint32]int64{}, map[uint32]bool{}
	for range 20_000 {
		e, above := 1+r.Uint32N(entries), r.Uint32N(entries+1)
		o, err := all.open(fmt.Sprint(r.IntN(pool.MaxOwners + 9)))
		if err != nil {
			t.Fatal(err)
		}
		all.owners[o].users--
		switch have := owned[e] != 0; {
		case !have:
			all.own(e, o, bytes, above)
			owned[e] = bytes
		case r.IntN(3) == 0:
			all.leave(e)
			left[e] = true
		case r.IntN(2) == 0:
			all.free(e, bytes)
			delete(owned, e)
			delete(left, e)
		default:
			all.use(e, above)
		}
		if err := all.check(owned, func(e uint32) bool { return !left[e] }); err != nil {
			t.Fatal(err)
		}
	}
}

// numberOf returns the owner of an owned entry; 0 if its owner's place was given away.
func (t *ownerTable) numberOf(e uint32) pool.Owner {
	if t.ownerOf(e) == nil {
		return 0
	}
	return t.links.All[e].owner
}

// check compares the table with what the pool has: owned returns the bytes of an entry and whether
// it is stored, for each of the entries in the pool that are marked as owned.
func (t *ownerTable) check(owned map[uint32]int64, stored func(e uint32) bool) error {
	bytes, listed := map[pool.Owner]int64{}, map[pool.Owner]int{}
	for e, n := range owned {
		o := t.numberOf(e)
		if o == 0 {
			continue
		}
		bytes[o] += n
		if l := &t.links.All[e]; l.listed != stored(e) {
			return fmt.Errorf("entry %d: stored %v, in the order of owner %d: %v", e, stored(e), o, l.listed)
		} else if l.listed {
			listed[o]++
		}
	}
	for i := range t.owners {
		at, o := &t.owners[i], pool.Owner(i)
		if at.bytes != bytes[o] {
			return fmt.Errorf("owner %d has %d bytes, counted are %d", o, bytes[o], at.bytes)
		}
		n, newer := 0, uint32(0)
		for e := at.newest; e != 0 && n <= listed[o]; e = t.links.All[e].older {
			if l := &t.links.All[e]; l.newer != newer || t.numberOf(e) != o {
				return fmt.Errorf("entry %d in the order of owner %d: after %d, not %d; it is owner %d's", e, o,
					l.newer, newer, t.numberOf(e))
			}
			n, newer = n+1, e
		}
		if n != listed[o] || at.oldest != newer {
			return fmt.Errorf("owner %d: %d entries in its order to %d, want %d to %d", o, n, newer, listed[o],
				at.oldest)
		}
	}
	return nil
}

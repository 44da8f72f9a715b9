package owner

import (
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
func table(t *testing.T, n uint32) (*Table, pool.Owner) {
	all, err := New(int(n) + 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { all.Unmap() })
	o, err := all.Open("one")
	if err != nil {
		t.Fatal(err)
	}
	for e := uint32(1); e <= n; e++ {
		if !all.Own(e, o, 1, 0) {
			t.Fatal("no memory")
		}
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
		v.children[e] = 1_000_000
	}
	steps := most
	if e := all.Victim(o, v, &steps); e != 0 || most-steps > n*usedSteps {
		t.Errorf("entry %d after %d steps, want none after %d at most", e, most-steps, n*usedSteps)
	}
	delete(v.children, 5)
	if e := all.Victim(o, v, &steps); e != 5 {
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
		e = all.Victim(o, v, &steps)
	}
	if e != n || calls > 16 {
		t.Errorf("entry %d after %d calls, want %d after 16 at most", e, calls, n)
	}
	steps := 0
	if again := all.Victim(o, v, &steps); again != e {
		t.Errorf("entry %d without a step, want %d again", again, e)
	}
}

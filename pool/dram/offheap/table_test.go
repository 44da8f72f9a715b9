package offheap

import (
	"math/rand/v2"
	"testing"
)

// tableOf is a table whose hashes are given by a slice.
type tableOf struct {
	Table
	hash []uint64 // of each entry
}

func (t *tableOf) hashes(entries []uint32, out []uint64) {
	for i, e := range entries {
		out[i] = t.hash[e]
	}
}

func (t *tableOf) has(e uint32) bool {
	c, home := t.Side(t.hash[e])
	tag := TagOf(t.hash[e], home)
	for i := home; ; i++ {
		var got uint32
		if got, i = c.Candidate(i, tag); got == 0 || got == e {
			return got == e
		}
	}
}

// TestTableAgainstSet adds and removes at random while the table grows several times over.
func TestTableAgainstSet(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	tab := &tableOf{hash: make([]uint64, 60_001)}
	var err error
	if tab.now, err = mapCells(firstCells); err != nil {
		t.Fatal(err)
	}
	defer tab.Close()
	for e := range tab.hash {
		tab.hash[e] = r.Uint64()
	}
	stored := map[uint32]bool{}
	grew := 0
	for step := range 150_000 {
		e := uint32(1 + r.IntN(len(tab.hash)-1))
		switch {
		case stored[e] && r.IntN(2) == 0:
			tab.Remove(tab.hash[e], e)
			delete(stored, e)
		case !stored[e]:
			was := tab.now.size
			tab.Grow(tab.hashes)
			if tab.now.size != was {
				grew++
			}
			if !tab.Put(tab.hash[e], e) {
				t.Fatalf("no room for entry %d of %d in %d buckets", tab.n, len(stored), tab.now.size)
			}
			stored[e] = true
		}
		if probe := uint32(1 + r.IntN(len(tab.hash)-1)); tab.has(probe) != stored[probe] {
			t.Fatalf("step %d: entry %d found %v, stored %v", step, probe, !stored[probe], stored[probe])
		}
	}
	if tab.n != len(stored) || grew < 5 {
		t.Fatalf("%d entries counted, %d stored, grown %d times", tab.n, len(stored), grew)
	}
	for e := uint32(1); int(e) < len(tab.hash); e++ {
		if tab.has(e) != stored[e] {
			t.Fatalf("entry %d found %v, stored %v", e, !stored[e], stored[e])
		}
	}
}

// TestTableRefusesWhatLiesTooFar gives all entries one hash, which no key can cause but must not
// end in a loop or a lost entry.
func TestTableRefusesWhatLiesTooFar(t *testing.T) {
	tab := &tableOf{hash: make([]uint64, 2*homeMask)}
	var err error
	if tab.now, err = mapCells(1 << 16); err != nil {
		t.Fatal(err)
	}
	defer tab.Close()
	put := 0
	for e := uint32(1); int(e) < len(tab.hash); e++ {
		if tab.Put(tab.hash[e], e) {
			put++
		}
	}
	if put != farthest+1 {
		t.Fatalf("%d entries of one hash, want %d", put, farthest+1)
	}
	for e := uint32(put); e >= 1; e-- {
		tab.Remove(0, e)
	}
	if tab.n != 0 {
		t.Fatalf("%d entries left", tab.n)
	}
}

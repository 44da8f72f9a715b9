package disk

import (
	"math/rand/v2"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// noted is what is known of a store by its notes.
type noted struct {
	t      *testing.T
	s      *Store
	signal chan struct{}
	held   map[int]bool
	last   []pool.Key
	losses int
}

func watch(t *testing.T, s *Store) *noted {
	n := &noted{t: t, s: s, signal: make(chan struct{}, 1), held: map[int]bool{}}
	s.Watch(func() {
		select {
		case n.signal <- struct{}{}:
		default:
		}
	})
	return n
}

func (n *noted) exists(i int) bool {
	status := make([]pool.Status, 1)
	if err := n.s.Exists(n.t.Context(), []pool.Key{keyOf(i)}, status); err != nil {
		n.t.Fatal(err)
	}
	return status[0] == pool.OK
}

// follow looks up what was noted, of blocks below most, and reports whether all is known.
func (n *noted) follow(most int) bool {
	select {
	case <-n.signal:
	default:
	}
	keys, lost := n.s.Changes(n.last)
	n.last = keys
	changed := map[pool.Key]bool{}
	for _, k := range keys {
		changed[k] = true
	}
	if lost {
		n.losses++
	}
	for i := range most {
		if lost || changed[keyOf(i)] {
			n.held[i] = n.exists(i)
		}
	}
	for i := range most {
		if n.held[i] != n.exists(i) {
			return false
		}
	}
	return true
}

// TestNotesNameWhatChanges: who looks up only what is noted knows what is stored, with puts,
// deletes, evictions, a directory that cannot be read for a while, and more changes than are noted.
func TestNotesNameWhatChanges(t *testing.T) {
	var fs broken
	o := small(t)
	o.faults = fs.meet
	s := open(t, o)
	wantPut(t, s, 0, 10, size)
	if all, lost := s.Changes(nil); len(all) > 0 || lost {
		t.Errorf("%d notes while nobody watches", len(all))
	}
	n := watch(t, s)
	for i := range 10 {
		n.held[i] = n.exists(i)
	}
	r := rand.New(rand.NewPCG(newSeed(t), 1))
	most := 10
	known := func() bool { return n.follow(most) }
	for round := 0; round < 20 || s.count[evicted].Load() == 0; round++ {
		to := most + 1 + r.IntN(60)
		wantPut(t, s, most, to, size)
		most = to
		gone := []pool.Key{keyOf(r.IntN(most)), keyOf(r.IntN(most))}
		if err := s.Delete(t.Context(), gone); err != nil {
			t.Fatal(err)
		}
		pooltest.Until(t, "all is known", known)
	}
	if n.losses > 0 {
		t.Errorf("everything was compared %d times", n.losses)
	}
	var keep []int // blocks that are held
	for i := range most {
		if n.held[i] {
			keep = append(keep, i)
		}
	}
	if len(keep) == 0 || len(keep) == most {
		t.Fatalf("%d of %d blocks are held", len(keep), most)
	}
	someHeld := func() bool {
		return slices.ContainsFunc(keep, n.exists)
	}
	fs.set(failing(unix.EIO, opRead, opWrite, opCreate, opAllocate))
	pooltest.Until(t, "the directory is not read any more", func() bool {
		for _, i := range keep {
			if n.held[i] {
				get(t, s, i, size)
			}
		}
		return n.follow(most) && !someHeld()
	})
	fs.set(nil)
	pooltest.Until(t, "the directory is back", func() bool { return n.follow(most) && someHeld() })
	if n.losses == 0 {
		t.Error("a directory came and went, and nothing says that all has to be compared")
	}
	for i := range maxNotes + 1 {
		s.notes.note(&pool.Key{Shard: uint8(i)})
	}
	if all, lost := s.Changes(nil); len(all) != maxNotes || !lost {
		t.Errorf("%d notes of more than fit, lost: %v", len(all), lost)
	}
}

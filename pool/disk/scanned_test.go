package disk

import (
	"os"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// TestEvictedWithoutAFooter damages the footer of a segment, and one of its blocks: when the
// segment is evicted, the index has nothing of it any more.
func TestEvictedWithoutAFooter(t *testing.T) {
	s := open(t, small(t))
	wantPut(t, s, 0, 200, size)
	d := s.dirs[0]
	oldest := func() *segment {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.segments[0]
	}
	g := oldest()
	pooltest.Until(t, "the oldest segment is closed", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return g.closed
	})
	victim, place := -1, place{}
	for i := 0; victim < 0; i++ {
		k := keyOf(i)
		if p, ok := s.index.get(s.tagOf(&k)); ok && p.segment == g.handle {
			victim, place = i, p
		}
	}
	info, err := os.Stat(g.path)
	if err != nil {
		t.Fatal(err)
	}
	flip(t, g.path, place.off()+headerBytes+5)
	flip(t, g.path, info.Size()-30)
	for i := 1000; oldest() == g; i++ {
		wantPut(t, s, i, i+1, size)
	}
	status := make([]pool.Status, 1)
	if err := s.Exists(t.Context(), []pool.Key{keyOf(victim)}, status); err != nil || status[0] == pool.OK {
		t.Errorf("a block of an evicted segment has the status %v, error %v", status[0], err)
	}
}

package disk

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// TestSyncFails checks that a delete whose tombstone could not be synced is said to be one in
// memory alone, and that one that was acknowledged holds after a crash.
func TestSyncFails(t *testing.T) {
	var fs broken
	o := small(t)
	o.faults = fs.meet
	s := open(t, o)
	wantPut(t, s, 0, 10, size)
	fs.set(failing(unix.EIO, opSync))
	if err := s.Delete(t.Context(), []pool.Key{keyOf(3)}); !errors.Is(err, ErrMemoryOnly) {
		t.Fatalf("delete: %v, want ErrMemoryOnly", err)
	}
	wantGet(t, s, 3, size, pool.Missing, "deleted")
	fs.set(nil)
	pooltest.Until(t, "it is on the disk", func() bool { return s.Delete(t.Context(), []pool.Key{keyOf(3)}) == nil })
	o.Dirs[0].Path, o.faults = crash(t, o.Dirs[0].Path), nil
	wantGet(t, open(t, o), 3, size, pool.Missing, "deleted, and recovered")
}

// TestDeleteSyncsTheName checks that the directory is synced too: a tombstone in a segment without
// a name deletes nothing after a power cut.
func TestDeleteSyncsTheName(t *testing.T) {
	o := small(t)
	synced := map[string]int{} // by one writer
	o.WriteDepth = 1
	o.faults = func(what op, path string, _ int64, p []byte) (int, error) {
		if what == opSync {
			synced[path]++
		}
		return len(p), nil
	}
	s := open(t, o)
	wantPut(t, s, 0, 10, size)
	for i := range 3 {
		if err := s.Delete(t.Context(), []pool.Key{keyOf(i)}); err != nil {
			t.Fatal(err)
		}
	}
	closeNow(t, s)
	segment := segmentFiles(t, o.Dirs[0].Path)[0]
	if len(synced) != 2 || synced[segment] != 3 || synced[o.Dirs[0].Path] != 3 {
		t.Errorf("synced %v, want the segment and its directory 3 times", synced)
	}
}

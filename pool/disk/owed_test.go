package disk

import (
	"encoding/binary"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// TestSyncFails checks that a delete whose tombstone could not be synced is still owed.
func TestSyncFails(t *testing.T) {
	var fs broken
	o := small(t)
	o.faults = fs.meet
	s := open(t, o)
	wantPut(t, s, 0, 10, size)
	fs.set(failing(unix.EIO, opSync))
	if err := s.Delete(t.Context(), []pool.Key{keyOf(3)}); !errors.Is(err, ErrOwed) {
		t.Fatalf("delete: %v, want ErrOwed", err)
	}
	wantGet(t, s, 3, size, pool.Missing, "deleted")
	fs.set(nil)
	pooltest.Until(t, "the delete is paid", func() bool {
		return s.stateOf(0) == StateOK && s.Stats().Dirs[0].Owed == 0
	})
	pooltest.Until(t, "it is on the disk", func() bool { return s.Delete(t.Context(), []pool.Key{keyOf(4)}) == nil })
	o.Dirs[0].Path, o.faults = crash(t, o.Dirs[0].Path), nil
	wantGet(t, open(t, o), 3, size, pool.Missing, "deleted, and recovered")
}

// TestTooManyOwed deletes more keys than are remembered while nothing can be written. Everything
// that the directory has on its disk is dropped then, but blocks in the index may be written again.
func TestTooManyOwed(t *testing.T) {
	var fs broken
	o := small(t)
	o.faults = fs.meet
	s := open(t, o)
	wantPut(t, s, 0, 100, size)
	fs.set(failing(unix.EIO, opWrite))
	pooltest.Until(
		t, "the state is failed", func() bool { put(t, s, blockOf(1000, size)); return s.stateOf(0) == StateFailed },
	)
	keys := []pool.Key{keyOf(7)}
	for i := range uint64(maxOwed) {
		k := keyOf(0)
		k.Hash = pool.MakeHash(binary.LittleEndian.AppendUint64([]byte("other"), i))
		keys = append(keys, k)
	}
	keys = append(keys, keyOf(8))
	if err := s.Delete(t.Context(), keys); !errors.Is(err, ErrOwed) {
		t.Fatalf("delete: %v, want ErrOwed", err)
	}
	fs.set(nil)
	pooltest.Until(t, "the state is ok", func() bool { return s.stateOf(0) == StateOK })
	d := s.dirs[0]
	pooltest.Until(t, "all is paid", func() bool { d.mu.Lock(); defer d.mu.Unlock(); return !d.owedAll && !d.evicting })
	wantPut(t, s, 2000, 2010, size)
	closeNow(t, s)
	s = open(t, o)
	wantGet(t, s, 7, size, pool.Missing, "deleted, and reopened")
	wantGet(t, s, 8, size, pool.Missing, "deleted, and reopened")
	wantGet(t, s, 2009, size, pool.OK, "stored afterwards")
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
	if len(synced) != 2 || synced[segment] != 3 || synced[o.Dirs[0].Path] != 1 {
		t.Errorf("synced %v, want the segment 3 times and its directory once", synced)
	}
}

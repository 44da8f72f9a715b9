package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// broken is a file system that fails in a way that can be changed at any time.
type broken struct{ f atomic.Pointer[faults] }

func (b *broken) set(f faults) { b.f.Store(&f) }

func (b *broken) meet(o op, path string, off int64, p []byte) (int, error) {
	if f := b.f.Load(); f != nil && *f != nil {
		return (*f)(o, path, off, p)
	}
	return len(p), nil
}

// failing fails some ops with an error.
func failing(err error, ops ...op) faults {
	return func(o op, _ string, _ int64, p []byte) (int, error) {
		for _, bad := range ops {
			if o == bad {
				return 0, err
			}
		}
		return len(p), nil
	}
}

func (s *Store) stateOf(i int) State {
	s.dirs[i].mu.Lock()
	defer s.dirs[i].mu.Unlock()
	return s.dirs[i].state
}

func TestStates(t *testing.T) {
	for _, c := range []struct {
		name string
		err  error
		ops  []op
		want State
	}{
		{"NoSpaceForASegment", unix.ENOSPC, []op{opAllocate}, StateFull},
		{"NoSpaceInAWrite", unix.ENOSPC, []op{opWrite}, StateFull},
		{"QuotaInAWrite", unix.EDQUOT, []op{opWrite}, StateFull},
		{"IOErrorInAWrite", unix.EIO, []op{opWrite}, StateFailed},
		{"ReadOnly", unix.EROFS, []op{opCreate, opWrite}, StateReadOnly},
		{"Gone", unix.ENOENT, []op{opCreate}, StateMissing},
	} {
		t.Run(c.name, func(t *testing.T) { testState(t, failing(c.err, c.ops...), c.want) })
	}
}

// testState breaks a store, checks its state and that it can still be read, repairs it, and waits
// until it is back.
func testState(t *testing.T, bad faults, want State) {
	var fs broken
	var mu sync.Mutex
	var told []string
	o := small(t)
	o.faults = fs.meet
	o.OnState = func(_ string, from, to State, _ error) {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, from.String()+" "+to.String())
	}
	s := open(t, o)
	wantPut(t, s, 0, 20, size)
	fs.set(bad)
	i, last := 20, 19 // the oldest may be evicted to make room
	pooltest.Until(t, "the state is "+want.String(), func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		items := []pool.Item{blockOf(i, size)}
		if err := s.Put(ctx, items); err != nil {
			t.Fatalf("a put into a broken directory: %v", err)
		}
		if items[0].Status == pool.OK {
			last = i
		}
		i++
		return s.stateOf(0) == want
	})
	if st := put(t, s, blockOf(100000, size)); st[0] != pool.Busy {
		t.Fatalf("put: status %d, want Busy", st[0])
	}
	if r := s.Report(); r.State != want.String() || !strings.HasPrefix(r.Reason, o.Dirs[0].Path+": ") {
		t.Fatalf("it says %q of itself because of %q, want %v, and the directory", r.State, r.Reason, want)
	}
	if want != StateMissing { // which is being opened again meanwhile
		wantGet(t, s, last, size, pool.OK, "what was stored is still read")
	}
	if err := s.Delete(t.Context(), []pool.Key{keyOf(last)}); err != nil {
		t.Fatalf("delete: %v", err)
	}
	if want != StateMissing {
		wantGet(t, s, last, size, pool.Missing, "deleted")
	}
	fs.set(nil)
	pooltest.Until(t, "the state is ok", func() bool { return s.stateOf(0) == StateOK })
	if r := s.Report(); r.State != "ok" || r.Reason != "" {
		t.Fatalf("it says %q of itself because of %q, and is mended", r.State, r.Reason)
	}
	wantPut(t, s, 200000, 200020, size)
	mu.Lock()
	first := strings.Join(told, ", ")
	mu.Unlock()
	if !strings.Contains(first, "ok "+want.String()) {
		t.Fatalf("told of the changes %q", first)
	}
	closeNow(t, s)
	s = open(t, o)
	wantGet(t, s, 200019, size, pool.OK, "reopened")
}

// TestReadsFail simulates a device that stops answering: gets miss at once, and hit again when it
// is back.
func TestReadsFail(t *testing.T) {
	var fs broken
	o := small(t)
	o.faults = fs.meet
	s := open(t, o)
	wantPut(t, s, 0, 100, size)
	fs.set(failing(unix.EIO, opRead, opWrite))
	for i := range failReads {
		wantGet(t, s, i, size, pool.Corrupt, "unreadable")
	}
	wantGet(t, s, 50, size, pool.Busy, "the device does not answer")
	if n := s.count[readErrors].Load(); n != failReads || s.stateOf(0) != StateFailed {
		t.Fatalf("%d read errors, state %v", n, s.stateOf(0))
	}
	fs.set(nil)
	pooltest.Until(t, "the state is ok", func() bool { return s.stateOf(0) == StateOK })
	wantGet(t, s, 50, size, pool.OK, "the device is back")
}

func TestShortReadIsNotDelivered(t *testing.T) {
	var fs broken
	o := small(t)
	o.faults = fs.meet
	s := open(t, o)
	wantPut(t, s, 0, 1, size)
	fs.set(func(o op, _ string, _ int64, p []byte) (int, error) {
		if o == opRead {
			return len(p) / 2, nil
		}
		return len(p), nil
	})
	wantGet(t, s, 0, size, pool.Corrupt, "a short read")
}

// TestEachWriteFails lets the nth write fail, whole, torn at any byte, or short, then crashes, and
// checks that every acknowledged block is there.
func TestEachWriteFails(t *testing.T) {
	parts := []int{0, 1, 100, 128, 4096, 5000, 9999, -1}
	if testing.Short() {
		parts = []int{0, 5000, -1}
	}
	for n := range 12 {
		for _, part := range parts {
			eachWrite(t, n, part)
		}
	}
}

func eachWrite(t *testing.T, n, part int) {
	o := small(t)
	var writes atomic.Int64 // a segment's footer is written beside its successor's pieces
	o.WriteDepth = 1
	o.faults = func(o op, path string, off int64, p []byte) (int, error) {
		if o != opWrite {
			return len(p), nil
		}
		if writes.Add(1) != int64(n+1) {
			return len(p), nil
		}
		if part < 0 {
			return min(len(p), pageBytes), nil // short, and gone on with
		}
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			t.Error(err)
			return 0, err
		}
		defer f.Close()
		if _, err := f.WriteAt(p[:min(part, len(p))], off); err != nil {
			t.Error(err)
		}
		return 0, unix.EIO
	}
	s := open(t, o)
	stored := map[int]bool{}
	for i := range 10 {
		items := []pool.Item{blockOf(2*i, size), blockOf(2*i+1, size)}
		for k, st := range put(t, s, items...) {
			stored[2*i+k] = st == pool.OK
		}
		if i == n {
			pooltest.Until(t, "the state is ok", func() bool { return s.stateOf(0) == StateOK })
		}
	}
	o.Dirs[0].Path, o.faults = crash(t, o.Dirs[0].Path), nil
	again := open(t, o)
	for i, ok := range stored {
		if got := get(t, again, i, size); ok && got != pool.OK {
			t.Fatalf(
				"write %d failed after %d bytes; block %d was acknowledged, and has status %d after a crash", n, part,
				i, got,
			)
		}
	}
	closeNow(t, s)
	closeNow(t, again)
}

func TestMissingDirectoryComesBack(t *testing.T) {
	o := small(t)
	parent := filepath.Join(o.Dirs[0].Path, "mount")
	o.Dirs[0].Path = filepath.Join(parent, "cache")
	s := open(t, o)
	if st := s.Report(); st.State != StateMissing.String() || !strings.Contains(st.Reason, "no such file") {
		t.Fatalf("a directory that is not there: %+v", st)
	}
	if st := put(t, s, blockOf(1, size)); st[0] != pool.Busy {
		t.Fatalf("put: status %d, want Busy", st[0])
	}
	if err := os.Mkdir(parent, 0o700); err != nil {
		t.Fatal(err)
	}
	pooltest.Until(t, "the state is ok", func() bool { return s.stateOf(0) == StateOK })
	wantPut(t, s, 1, 2, size)
	wantGet(t, s, 1, size, pool.OK, "stored after it came back")
}

func TestDirectoryIsLostInFlight(t *testing.T) {
	o := small(t)
	o.Dirs[0].Path = filepath.Join(o.Dirs[0].Path, "cache")
	s := open(t, o)
	wantPut(t, s, 0, 20, size)
	away := o.Dirs[0].Path + ".away"
	if err := os.Rename(o.Dirs[0].Path, away); err != nil {
		t.Fatal(err)
	}
	i := 1000
	pooltest.Until(t, "the state is missing", func() bool {
		put(t, s, blockOf(i, size))
		i++
		return s.stateOf(0) == StateMissing
	})
	if err := os.Rename(away, o.Dirs[0].Path); err != nil {
		t.Fatal(err)
	}
	pooltest.Until(t, "the state is ok", func() bool { return s.stateOf(0) == StateOK })
	wantGet(t, s, 3, size, pool.OK, "it was there before, and recovered")
	wantPut(t, s, 50, 60, size)
}

func TestOneOfTwoDirectoriesIsMissing(t *testing.T) {
	o := small(t)
	o.Dirs = append(o.Dirs, Dir{filepath.Join(t.TempDir(), "not", "there"), 4 << 20})
	s := open(t, o)
	var ok, busy int
	for i := range 100 {
		switch st := put(t, s, blockOf(i, size)); st[0] {
		case pool.OK:
			ok++
			wantGet(t, s, i, size, pool.OK, "put")
		case pool.Busy:
			busy++
			wantGet(t, s, i, size, pool.Busy, "it may be there")
		}
	}
	if ok < 25 || busy < 25 || ok+busy != 100 {
		t.Fatalf("%d blocks stored, %d busy, want about half of 100 each", ok, busy)
	}
}

func TestRealFullDisk(t *testing.T) {
	o := small(t)
	mount(t, "-t", "tmpfs", "-o", "size=3m", "tmpfs", o.Dirs[0].Path) // less than the store's limit of 4 MiB
	hog := filepath.Join(o.Dirs[0].Path, "hog")
	s := open(t, o)
	for i := range 1500 {
		put(t, s, blockOf(i, size)) // evicts instead of failing
	}
	wantGet(t, s, 1499, size, pool.OK, "the last block")
	if s.stateOf(0) != StateOK {
		t.Fatalf("state %v, although what is older can go", s.stateOf(0))
	}
	closeNow(t, s)
	for _, f := range segmentFiles(t, o.Dirs[0].Path) {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(hog, make([]byte, 4<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("filling the disk: %v", err)
	}
	s = open(t, o)
	pooltest.Until(t, "somebody else filled the disk", func() bool { return s.stateOf(0) == StateFull })
	if st := put(t, s, blockOf(1, size)); st[0] != pool.Busy {
		t.Fatalf("put: status %d, want Busy", st[0])
	}
	if err := os.Remove(hog); err != nil {
		t.Fatal(err)
	}
	pooltest.Until(t, "the state is ok", func() bool { return s.stateOf(0) == StateOK })
	wantPut(t, s, 5000, 5010, size)
}

func TestReadOnlyMount(t *testing.T) {
	o := small(t)
	dir := o.Dirs[0].Path
	mount(t, "-t", "tmpfs", "-o", "size=16m", "tmpfs", dir)
	s := open(t, o)
	wantPut(t, s, 0, 100, size)
	closeNow(t, s)
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, "size=16m"); err != nil {
		t.Fatal(err)
	}
	s = open(t, o)
	wantGet(t, s, 99, size, pool.OK, "a read-only file system")
	pooltest.Until(t, "the state is readonly", func() bool { return s.stateOf(0) == StateReadOnly })
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT, "size=16m"); err != nil {
		t.Fatal(err)
	}
	pooltest.Until(t, "the state is ok", func() bool { return s.stateOf(0) == StateOK })
	wantPut(t, s, 100, 110, size)
}

// TestDiskHangs checks, with a disk that does not end a read or a write, that the caller returns at
// its deadline, that its memory is not accessed afterwards, and that Close waits for the disk.
func TestDiskHangs(t *testing.T) {
	t.Run("read", func(t *testing.T) { testDiskHangs(t, (*Store).Get, opRead, 0) })
	t.Run("write", func(t *testing.T) { testDiskHangs(t, (*Store).Put, opWrite, 10) })
}

// testDiskHangs makes a call for ten blocks, of which the first ten are stored.
func testDiskHangs(t *testing.T, call func(*Store, context.Context, []pool.Item) error, hanging op, first int) {
	var fs broken
	o := small(t)
	o.faults = fs.meet
	s := open(t, o)
	wantPut(t, s, 0, 10, size)
	goOn := make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(release) // before the store is closed, if the test fails
	fs.set(func(o op, _ string, _ int64, p []byte) (int, error) {
		if o == hanging {
			<-goOn
		}
		return len(p), nil
	})
	var items []pool.Item
	for i := range 10 {
		items = append(items, pool.Item{Key: keyOf(first + i), Data: make([]byte, size)})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := call(s, ctx, items); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("from a disk that hangs: %v", err)
	}
	for i := range items {
		items[i].Data[0] = 1 // a race, if the store reads or writes it now
	}
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	pooltest.Until(t, "Close waits for the disk", func() bool {
		select {
		case err := <-closed:
			t.Fatalf("closed with %v while the disk is at work", err)
		default:
		}
		return pooltest.Parked("sync.WaitGroup.Wait", "disk.(*Store).Close")
	})
	release()
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
	for i := range items {
		if items[i].Data[0] = 0; strings.Trim(string(items[i].Data), "\x00") != "" {
			t.Fatal("the caller's memory was written after the call came back")
		}
	}
}

func TestWithoutDirect(t *testing.T) {
	o := small(t)
	o.faults = failing(unix.EINVAL, opDirect)
	s := open(t, o)
	wantPut(t, s, 0, 20, size)
	wantGet(t, s, 7, size, pool.OK, "through the page cache")
}

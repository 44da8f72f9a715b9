package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// needQueue skips where the kernel gives no queue, to tests that are about nothing else.
func needQueue(t testing.TB) {
	t.Helper()
	q, err := openQueue(t.TempDir(), 1, nil)
	if err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	if err := q.close(); err != nil {
		t.Fatal(err)
	}
}

// TestReadsHoldNoThread would count them, if they did.
func TestReadsHoldNoThread(t *testing.T) {
	needQueue(t)
	s := open(t, small(t))
	wantPut(t, s, 0, 50, size)
	if !s.Stats().Dirs[0].Direct {
		t.Skip("SKIPPED: a file system without O_DIRECT")
	}
	for i := range 50 {
		wantGet(t, s, i, size, pool.OK, "put")
	}
	if st := s.Stats(); st.Reads != 50 || st.ReadsInThreads != 0 {
		t.Fatalf("%d of %d reads held a thread", st.ReadsInThreads, st.Reads)
	}
}

func TestStoreInThreads(t *testing.T) {
	pooltest.TestStore(t, func(t testing.TB, _ ...pool.Spec) pool.Store {
		o := small(t)
		o.faults = failing(unix.EAGAIN, opQueue)
		return open(t, o)
	})
}

// TestNoQueue is a machine whose fs.aio-max-nr is used up: reads hold threads, and it is told and counted.
func TestNoQueue(t *testing.T) {
	o := small(t)
	o.faults = failing(unix.EAGAIN, opQueue)
	var told atomic.Int32
	o.OnState = func(_ string, from, to State, reason error) {
		if from == to && errors.Is(reason, ErrThreads) && errors.Is(reason, unix.EAGAIN) {
			told.Add(1)
		}
	}
	s := open(t, o)
	wantPut(t, s, 0, 20, size)
	for i := range 20 {
		wantGet(t, s, i, size, pool.OK, "read in a thread")
	}
	if n := s.Stats().ReadsInThreads; n != 20 {
		t.Fatalf("%d reads in threads, want 20", n)
	}
	shown := false
	for _, c := range s.Report().Counts {
		shown = shown || c == pool.Count{Name: "reads_in_threads", N: 20}
	}
	if !shown {
		t.Fatalf("the report does not say so: %+v", s.Report().Counts)
	}
	eventually(t, "it is told", func() bool { return told.Load() == 1 })
}

// TestQueueTakesNoMore is a kernel that refuses every second read.
func TestQueueTakesNoMore(t *testing.T) {
	needQueue(t)
	o := small(t)
	var n atomic.Int64
	o.faults = func(o op, _ string, _ int64, p []byte) (int, error) {
		if o == opSubmit && n.Add(1)%2 == 0 {
			return 0, unix.EAGAIN
		}
		return len(p), nil
	}
	s := open(t, o)
	wantPut(t, s, 0, 20, size)
	for i := range 20 {
		wantGet(t, s, i, size, pool.OK, "some in a thread")
	}
	if n := s.Stats().ReadsInThreads; n != 10 {
		t.Fatalf("%d reads in threads, want 10", n)
	}
}

// TestReadThatDoesNotEnd is a disk that hangs: the kernel has the read, and does not say that it has ended. The caller comes back at its deadline, its
// memory is left alone afterwards, and Close waits for the kernel.
func TestReadThatDoesNotEnd(t *testing.T) {
	needQueue(t)
	o := small(t)
	goOn := make(chan struct{})
	o.faults = func(o op, _ string, _ int64, p []byte) (int, error) {
		if o == opReap {
			<-goOn
		}
		return len(p), nil
	}
	s := open(t, o)
	wantPut(t, s, 0, 10, size)
	if !s.Stats().Dirs[0].Direct {
		t.Skip("SKIPPED: a file system without O_DIRECT")
	}
	var items []pool.Item
	for i := range 10 {
		items = append(items, pool.Item{Key: keyOf(i), Data: make([]byte, size)})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := s.Get(ctx, items); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("get from a disk that hangs: %v", err)
	}
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	select {
	case err := <-closed:
		t.Fatalf("closed with %v while the kernel has a read", err)
	case <-time.After(20 * time.Millisecond):
	}
	close(goOn)
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
	for i := range items {
		if strings.Trim(string(items[i].Data), "\x00") != "" {
			t.Fatal("the caller's memory was written after the call came back")
		}
	}
}

// TestQueueReads holds what a reader gets against what pread gives: whole reads, the file's end, what lies behind it, and an offset that
// O_DIRECT does not allow.
func TestQueueReads(t *testing.T) {
	needQueue(t)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, noise[:3*pageBytes], 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := openFile(path, unix.O_RDONLY, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer f.close()
	if !f.direct {
		t.Skip("SKIPPED: a file system without O_DIRECT")
	}
	q, err := openQueue(path, 3, nil)
	if err != nil {
		t.Fatal(err)
	}
	p, err := mapMemory(2 * pageBytes)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unmap(p) }()
	want := make([]byte, len(p))
	for i := range 3 {
		read := q.reader(i, func() { t.Error("it was read in a thread") })
		for _, off := range []int64{0, pageBytes, 2 * pageBytes, 3 * pageBytes, 1} {
			clear(p)
			n, err := read(f, p, off)
			m, wantErr := pread(f, p, off)
			copy(want, noise[min(off, 3*pageBytes):3*pageBytes])
			if n != max(m, 0) || !errors.Is(err, wantErr) || string(p[:n]) != string(want[:n]) {
				t.Errorf("place %d, offset %d: %d bytes, %v, or other bytes; pread: %d, %v", i, off, n, err, m, wantErr)
			}
		}
	}
	if err := q.close(); err != nil {
		t.Fatal(err)
	}
}

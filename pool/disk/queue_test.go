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

// needQueue skips a test that needs a queue if the kernel has none.
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

// TestNothingHoldsAThread counts the reads and writes that held a thread.
func TestNothingHoldsAThread(t *testing.T) {
	needQueue(t)
	s := open(t, small(t))
	wantPut(t, s, 0, 50, size)
	if !s.Stats().Dirs[0].Direct {
		t.Skip("SKIPPED: a file system without O_DIRECT")
	}
	for i := range 50 {
		wantGet(t, s, i, size, pool.OK, "put")
	}
	if st := s.Stats(); st.Writes != 50 || st.Reads != 50 || st.InThreads != 0 {
		t.Fatalf("%d of %d writes and %d reads held a thread", st.InThreads, st.Writes, st.Reads)
	}
}

func TestStoreInThreads(t *testing.T) {
	pooltest.TestStore(t, func(t testing.TB, _ ...pool.Spec) pool.Store {
		o := small(t)
		o.faults = failing(unix.EAGAIN, opQueue)
		return open(t, o)
	})
}

// TestNoQueue simulates a machine without free fs.aio-max-nr: reads and writes hold threads, which
// is reported and counted.
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
	if n := s.Stats().InThreads; n != 40 {
		t.Fatalf("%d writes and reads in threads, want 40", n)
	}
	shown := false
	for _, c := range s.Report().Counts {
		shown = shown || c == pool.Count{Name: "in_threads", N: 40}
	}
	if !shown {
		t.Fatalf("the report does not say so: %+v", s.Report().Counts)
	}
	pooltest.Until(t, "it is told", func() bool { return told.Load() == 1 })
}

// TestQueueTakesNoMore simulates a kernel that refuses every second command.
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
	if n := s.Stats().InThreads; n != 20 {
		t.Fatalf("%d writes and reads in threads, want 20 of 40", n)
	}
}

// The disk hangs: the kernel does not complete a read or a write. The caller returns at its
// deadline, its memory is not accessed afterwards, and Close waits for the kernel.
func TestQueueHangs(t *testing.T) {
	needQueue(t)
	t.Run("read", func(t *testing.T) { testQueueHangs(t, (*Store).Get, 0) })
	t.Run("write", func(t *testing.T) { testQueueHangs(t, (*Store).Put, 10) })
}

// testQueueHangs makes a call for ten blocks, of which the first ten are stored.
func testQueueHangs(t *testing.T, call func(*Store, context.Context, []pool.Item) error, first int) {
	var fs broken
	o := small(t)
	o.faults = fs.meet
	s := open(t, o)
	wantPut(t, s, 0, 10, size)
	if !s.Stats().Dirs[0].Direct {
		t.Skip("SKIPPED: a file system without O_DIRECT")
	}
	goOn := make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(release) // before the store is closed, if the test fails
	fs.set(func(o op, _ string, _ int64, p []byte) (int, error) {
		if o == opReap {
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
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	pooltest.Until(t, "Close waits for the kernel", func() bool {
		select {
		case err := <-closed:
			t.Fatalf("closed with %v while the kernel is at work", err)
		default:
		}
		for _, d := range s.dirs {
			d.mu.Lock()
			stopping := d.stopping // the last that Close does before
			d.mu.Unlock()
			if !stopping {
				return false
			}
		}
		return pooltest.Parked("sync.WaitGroup.Wait", "disk.(*Store).Close")
	})
	release()
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
	for i := range items {
		if strings.Trim(string(items[i].Data), "\x00") != "" {
			t.Fatal("the caller's memory was written after the call came back")
		}
	}
}

// queueFile returns a file of three pages opened with O_DIRECT, and a queue.
func queueFile(t *testing.T, places int) (*file, *queue, []byte) {
	t.Helper()
	needQueue(t)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, noise[:3*pageBytes], 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := openFile(path, unix.O_RDWR, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !f.direct {
		t.Skip("SKIPPED: a file system without O_DIRECT")
	}
	q, err := openQueue(path, places, nil)
	if err != nil {
		t.Fatal(err)
	}
	memory, err := mapMemory(2 * pageBytes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(q.close(), f.close(), unmap(memory)); err != nil {
			t.Error(err)
		}
	})
	return f, q, memory
}

// TestQueueReads compares reads through the queue with pread: whole reads, the end of the file,
// reads past it, and an offset that O_DIRECT does not allow.
func TestQueueReads(t *testing.T) {
	f, q, p := queueFile(t, 3)
	want := make([]byte, len(p))
	for i := range 3 {
		read := q.io(i, commandRead, func() { t.Error("it was read in a thread") })
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
}

func TestQueueWrites(t *testing.T) {
	f, q, p := queueFile(t, 2)
	for i := range 2 {
		write := q.io(i, commandWrite, func() { t.Error("it was written in a thread") })
		for _, off := range []int64{0, pageBytes, 2 * pageBytes} { // the last one makes the file longer
			copy(p, noise[int(off)+100+i:])
			if n, err := write(f, p, off); n != len(p) || err != nil {
				t.Fatalf("place %d, offset %d: %d bytes, %v", i, off, n, err)
			}
			if b, err := os.ReadFile(f.path); err != nil || string(b[off:off+int64(len(p))]) != string(p) {
				t.Fatalf("place %d, offset %d: %v, or other bytes", i, off, err)
			}
		}
		if n, err := write(f, p, 1); n != 0 || !errors.Is(err, unix.EINVAL) {
			t.Errorf("place %d, offset 1: %d bytes, %v, want EINVAL", i, n, err)
		}
	}
	if b, err := os.ReadFile(f.path); err != nil || len(b) != 4*pageBytes {
		t.Errorf("the file has %d bytes, want %d: %v", len(b), 4*pageBytes, err)
	}
}

package takeover

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/pool/dram"
)

func poolFile(t *testing.T) (path string, open func(abandon bool) (*dram.Pool, error)) {
	dir, err := os.MkdirTemp("/dev/shm", "kvagent-test-")
	if err != nil {
		t.Skipf("SKIPPED: no tmpfs on /dev/shm: %v", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path = filepath.Join(dir, "pool")
	return path, func(abandon bool) (*dram.Pool, error) {
		return dram.Open(dram.Options{Bytes: 1 << 20, Path: path, Abandon: abandon})
	}
}

// A pool's file is abandoned only once its agent has ended, by a process that it left.
func TestWhoseFileIsAbandoned(t *testing.T) {
	path, open := poolFile(t)
	take := func() (*dram.Pool, string, error) {
		return New(50*time.Millisecond, zap.NewNop()).Pool(t.Context(), path, open)
	}
	first, err := open(false)
	if err != nil {
		t.Fatal(err)
	}
	_, fd := first.Arena()
	shared, err := syscall.Dup(fd) // as a mover has it
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(shared)
	var held *dram.HeldError
	if p, _, err := take(); !errors.As(err, &held) || held.Process != os.Getpid() {
		t.Fatalf("the file of a living agent: abandoned: %v, %v", p != nil, err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	p, why, err := take()
	if err != nil || why == "" || !p.Info().Recovery.New {
		t.Fatalf("the file of an agent that has ended: abandoned: %q, %v", why, err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// The wait for the directory takes nothing from the wait for the file.
func TestFileIsWaitedForAfterTheDirectory(t *testing.T) {
	path, open := poolFile(t)
	first, err := open(false)
	if err != nil {
		t.Fatal(err)
	}
	_, fd := first.Arena()
	shared, err := syscall.Dup(fd) // as a mover has it
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	take, tries := New(time.Minute, zap.NewNop()), 0
	take.end = time.Now() // the directory came late
	p, why, err := take.Pool(t.Context(), path, func(abandon bool) (*dram.Pool, error) {
		if tries++; tries == 3 {
			_ = syscall.Close(shared)
		}
		return open(abandon)
	})
	if err != nil || why != "" {
		t.Fatalf("abandoned: %q, %v", why, err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// Of several agents that wait for a file whose agent has ended, one has the new file, and the
// others do not remove that.
func TestOneOfSeveralAbandonsAFile(t *testing.T) {
	path, open := poolFile(t)
	first, err := open(false)
	if err != nil {
		t.Fatal(err)
	}
	_, fd := first.Arena()
	shared, err := syscall.Dup(fd) // as a mover has it
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(shared)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	pools := make(chan *dram.Pool, 8)
	var all sync.WaitGroup
	for i := range cap(pools) {
		all.Go(func() {
			wait := 50*time.Millisecond + time.Duration(i)*3*time.Millisecond
			p, _, err := New(wait, zap.NewNop()).Pool(t.Context(), path, open)
			if err == nil {
				pools <- p
			} else if !errors.As(err, new(*dram.HeldError)) {
				t.Error(err)
			}
		})
	}
	all.Wait()
	close(pools)
	if len(pools) != 1 {
		t.Errorf("%d agents have a file at the same path", len(pools))
	}
	for p := range pools {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}

package takeover

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/pool/dram"
)

// A pool's file is abandoned only once its agent has ended, by a process that it left.
func TestWhoseFileIsAbandoned(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "kvagent-test-")
	if err != nil {
		t.Skipf("SKIPPED: no tmpfs on /dev/shm: %v", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "pool")
	open := func() (*dram.Pool, error) { return dram.Open(dram.Options{Bytes: 1 << 20, Path: path}) }
	take := func() (*dram.Pool, string, error) {
		return New(50*time.Millisecond, zap.NewNop()).Pool(t.Context(), path, open)
	}
	first, err := open()
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

package engine

import (
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

func TestStreamIsOrderedAndAsynchronous(t *testing.T) {
	e, err := NewHost(2, 2)
	if err != nil {
		t.Fatal(err)
	}
	s, gate := e.NewStream(), make(chan struct{})
	var order []int
	s.Launch(func() { <-gate })
	for i := range 100 {
		s.Launch(func() { order = append(order, i) })
	}
	s.SetStep(3)
	if e.Step() != 0 {
		t.Error("the step word was written before the stream got there")
	}
	close(gate)
	s.Synchronize()
	if len(order) != 100 || e.Step() != 3 {
		t.Fatalf("%d of 100 kernels ran, step %d, want 3", len(order), e.Step())
	}
	for i, n := range order {
		if i != n {
			t.Fatalf("kernel %d ran as number %d", n, i)
		}
	}
	s.SetStep(2)
	s.Synchronize()
	if e.Step() != 3 {
		t.Errorf("the step word went back to %d", e.Step())
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

func TestCloseOfAnEngineEndsItsStreams(t *testing.T) {
	e, err := NewHost(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ran atomic.Int32
	for range 4 {
		s := e.NewStream()
		for range 10 {
			s.Launch(func() { ran.Add(1) })
		}
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if ran.Load() != 40 {
		t.Errorf("%d of 40 kernels ran before Close returned", ran.Load())
	}
	if err := e.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
	if _, err := e.Alloc(1, 4096); err == nil {
		t.Error("Alloc after Close: no error")
	}
}

func TestMemoryOfAnEngine(t *testing.T) {
	e, err := NewHost(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = e.Close() }()
	m, err := e.Alloc(0, 8192)
	if err != nil {
		t.Fatal(err)
	}
	if unix.Ftruncate(m.FD, 4096) == nil {
		t.Error("the memory can be cut off")
	}
	for name, try := range map[string]func() (*HostMemory, error){
		"an id twice":       func() (*HostMemory, error) { return e.Alloc(0, 4096) },
		"the words' id":     func() (*HostMemory, error) { return e.Alloc(SyncRegion, 4096) },
		"no bytes":          func() (*HostMemory, error) { return e.Alloc(1, 0) },
		"a negative size":   func() (*HostMemory, error) { return e.Alloc(1, -1) },
		"more than allowed": func() (*HostMemory, error) { return e.Alloc(1, MaxMemory+1) },
	} {
		if _, err := try(); err == nil {
			t.Errorf("Alloc with %s: no error", name)
		}
	}
	if _, err := NewHost(MaxEvents+1, 0); err == nil {
		t.Error("NewHost with too many events: no error")
	}
}

//go:build cuda && softcuda

package main

import (
	"strings"
	"testing"
	"time"
)

// A GPU whose driver has an error that no call survives costs its own engines: they are told,
// others are served on before and after, and readyz names the GPU that does not come back.
func TestCUDAOneOfTwoGPUsIsLost(t *testing.T) {
	t.Parallel()
	// The knob is of each process: virtual memory is imported on the first GPU alone.
	n := newNode(t, []string{"SOFTCUDA_DEVICES=2", "SOFTCUDA_FAIL=cuMemImportFromShareableHandle:0:700"})
	serve := func(when string) {
		other := n.engine("cuda", "--requests", "20")
		other.Env = append(other.Env, "SOFTCUDA_FIRST_DEVICE=1")
		if said, err := other.CombinedOutput(); err != nil {
			t.Errorf("the other GPU's engine %s: %v, %s", when, err, said)
		}
	}
	serve("before")
	if now := n.ready(); now != "ok" {
		t.Errorf("readyz before: %s", now)
	}
	beside := n.engine("cuda", "--requests", "20", "--hold")
	beside.Env = append(beside.Env, "SOFTCUDA_FIRST_DEVICE=1")
	if err := beside.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = beside.Process.Kill()
		_ = beside.Wait() // it was killed
	})
	const gpu = "GPU-736f6674-6375-6461-2d64-657669636500"
	var said string
	// an engine asks for a mover as long as it tries: on a slow machine for too few
	for try := 0; try == 0 || !namesLost(n, gpu); try++ {
		if try == 5 {
			t.Fatalf("readyz does not name the lost GPU: %s", n.ready())
		}
		var err error
		if said, err = n.run("cuda-virtual", "--attach-within", "3s"); err == nil {
			t.Errorf("the lost GPU's engine was served: %s", said)
		}
	}
	// of those that ended the agent hears a moment later
	for limit := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if engines := agentStatus(t, n.dir).Engines; engines == 1 {
			break
		} else if time.Now().After(limit) {
			t.Fatalf("%d engines, want the one on the other GPU, which has lost nothing", engines)
		}
	}
	serve("after")
	for _, m := range agentStatus(t, n.dir).Movers {
		if lost := m.Name == gpu; lost != (m.Lost["device"] > 0) || lost == m.Running {
			t.Errorf("%s: lost %v, runs: %v", m.Name, m.Lost, m.Running)
		}
	}
	if log := n.end(); !strings.Contains(said+log, "CUDA_ERROR_ILLEGAL_ADDRESS") {
		t.Errorf("neither the engine nor the log has the driver's error: %s\n%s", said, log)
	}
}

// namesLost reports whether readyz comes to name a GPU as lost, soon.
func namesLost(n *softNode, gpu string) bool {
	// a pause between two questions to another process
	for limit := time.Now().Add(time.Second); time.Now().Before(limit); time.Sleep(5 * time.Millisecond) {
		if strings.Contains(n.ready(), "movers fail again and again: "+gpu) {
			return true
		}
	}
	return false
}

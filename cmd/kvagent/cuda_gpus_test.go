//go:build cuda && softcuda

package main

import (
	"strings"
	"testing"

	"github.com/kvagent/kvagent/pool/pooltest"
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
	// an engine asks for a mover as long as it tries, and the agent names the GPU after a few
	said := n.lose("cuda-virtual", gpu)
	pooltest.Until(t, "the agent has the one engine on the other GPU, which has lost nothing", func() bool {
		return agentStatus(t, n.dir).Engines == 1
	})
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

// lose has an engine try until readyz names its GPU as lost, and returns what the engine said.
func (n *softNode) lose(device, gpu string) (said string) {
	n.t.Helper()
	var out processLog
	engine := n.engine(device, "--attach-within", "1h")
	engine.Stdout, engine.Stderr = &out, &out
	if err := engine.Start(); err != nil {
		n.t.Fatal(err)
	}
	over := make(chan error, 1)
	go func() { over <- engine.Wait() }()
	pooltest.Until(n.t, "readyz names the lost GPU", func() bool {
		select {
		case err := <-over:
			n.t.Errorf("the lost GPU's engine ended with %v: %s", err, out.String())
			over <- err
			n.t.FailNow()
		default:
		}
		return strings.Contains(n.ready(), "movers fail again and again: "+gpu)
	})
	_ = engine.Process.Kill()
	<-over // it was killed
	return out.String()
}

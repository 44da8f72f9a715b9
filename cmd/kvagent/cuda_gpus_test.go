//go:build cuda && softcuda

package main

import (
	"os/exec"
	"strings"
	"testing"
	"time"
)

// engineOn starts an engine that sees one GPU of the machine.
func engineOn(t *testing.T, gpu, dir, device string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := kvagentCommand(t, append([]string{"mock", "--device", device, "--socket-dir", dir}, args...)...)
	cmd.Env = append(cmd.Env, "SOFTCUDA_FIRST_DEVICE="+gpu)
	return cmd
}

// A GPU whose driver has an error that no call survives costs its own engines: they are told, others are served on before and after, and
// readyz names the GPU that does not come back.
func TestCUDAOneOfTwoGPUsIsLost(t *testing.T) {
	softMachine(t)
	// The knob is of each process: virtual memory is imported on the first GPU alone.
	dir, log := faultyServe(t, map[string]string{"SOFTCUDA_DEVICES": "2", "SOFTCUDA_FAIL": "cuMemImportFromShareableHandle:0:700"})
	serve := func(when string) {
		if said, err := engineOn(t, "1", dir, "cuda", "--requests", "20").CombinedOutput(); err != nil {
			t.Errorf("the other GPU's engine %s: %v, %s", when, err, said)
		}
	}
	serve("before")
	ready := func() string {
		body, err := newAdmin(dir).get(t.Context(), "/readyz")
		if err != nil {
			return err.Error()
		}
		return strings.TrimSpace(string(body))
	}
	if now := ready(); now != "ok" {
		t.Errorf("readyz before: %s", now)
	}
	beside := engineOn(t, "1", dir, "cuda", "--requests", "20", "--hold")
	if err := beside.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = beside.Process.Kill()
		_ = beside.Wait() // it was killed
	})
	said, err := engineOn(t, "0", dir, "cuda-virtual", "--attach-within", "3s").CombinedOutput()
	if err == nil || !strings.Contains(string(said)+log.String(), "CUDA_ERROR_ILLEGAL_ADDRESS") {
		t.Errorf("the lost GPU's engine: %v, %s", err, said)
	}
	for limit := time.Now().Add(10 * time.Second); !strings.Contains(ready(), "movers fail again and again: GPU-736f6674-6375-6461-2d64-657669636500"); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(limit) { // a pause between two questions to another process
			t.Fatalf("readyz does not name the lost GPU: %s", ready())
		}
	}
	if n := agentStatus(t, dir).Engines; n != 1 {
		t.Errorf("%d engines, want the one on the other GPU, which has lost nothing", n)
	}
	serve("after")
	for _, m := range agentStatus(t, dir).Movers {
		if other := strings.HasSuffix(m.Name, "01"); other == (m.Lost["device"] > 0) || other != m.Running {
			t.Errorf("%s: lost %v, runs: %v", m.Name, m.Lost, m.Running)
		}
	}
}

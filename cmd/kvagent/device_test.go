package main

import (
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/settings"
)

// A start that is to need a GPU ends where there is none, and says so; any other goes on.
func TestServeWithoutCUDA(t *testing.T) {
	if _, err := os.Stat("/dev/nvidiactl"); err == nil {
		t.Skip("this machine has a GPU")
	}
	out, code := kvagentOutput(t, "serve", "--device", "cuda", "--pool", "16MiB", "--socket-dir", t.TempDir())
	if code != exitFailed || !strings.Contains(out, "no CUDA") || !strings.Contains(out, "device") {
		t.Errorf("exit %d, want %d and why:\n%s", code, exitFailed, out)
	}
	for _, device := range []string{settings.DeviceAuto, settings.DeviceHost, settings.DeviceHostMover} {
		serve, dir, log := startServe(t, "--device", device)
		out, code := kvagentOutput(t, "status", "--json", "--socket-dir", dir)
		if code != 0 || strings.Contains(out, `"device": "host"`) != (device == settings.DeviceHostMover) {
			t.Errorf("%s: exit %d, movers are not as asked for:\n%s", device, code, out)
		}
		endServe(t, serve)
		said := strings.Contains(log.String(), "GPUs that the kernel lists")
		if said != (device != settings.DeviceHost) {
			t.Errorf("%s: the log says %v which GPUs there are:\n%s", device, said, log)
		}
	}
}

// endServe ends an agent in order, after which its log is complete and no longer written.
func endServe(t *testing.T, serve *exec.Cmd) {
	t.Helper()
	if err := serve.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := serve.Wait(); err != nil {
		t.Errorf("serve ended with %v", err)
	}
}

// A mover is started by an agent only.
func TestMoverByHand(t *testing.T) {
	out, code := kvagentOutput(t, "mover")
	if code != exitFailed || !strings.Contains(out, "started by an agent") {
		t.Errorf("exit %d, want %d and a hint:\n%s", code, exitFailed, out)
	}
}

// TestGPUIsLoggedOnce: two processes of its mover tell of it at once, as one ends.
func TestGPUIsLoggedOnce(t *testing.T) {
	core, logged := observer.New(zap.InfoLevel)
	informed := informGPU(zap.New(core))
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for range 100 {
				informed(cudaipc.CUDAInfo{Name: "some", PinDone: true})
			}
		})
	}
	wg.Wait()
	if n := logged.Len(); n != 2 {
		t.Errorf("%d lines, want one that it is open and one that the pool is pinned", n)
	}
}

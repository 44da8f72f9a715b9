//go:build cuda && softcuda

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// softNode is an agent on a pretended machine of its own, which a test may have beside those of
// other tests.
type softNode struct {
	t       *testing.T
	machine []string // environment of all processes of the machine
	dir     string   // of the agent's sockets
	serve   *exec.Cmd
	log     bytes.Buffer // the agent's, whole when it has ended
}

// newNode starts an agent whose movers, and no engines, have the driver with these settings in
// their environment.
func newNode(t *testing.T, driver []string, args ...string) *softNode {
	t.Helper()
	if os.Getenv("KVAGENT_LIBCUDA") == "" {
		t.Fatal("KVAGENT_LIBCUDA names no software driver: run `make test-cuda`")
	}
	root, err := os.MkdirTemp("/dev/shm", "kvagent-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) }) // a leftover of a failed test does no harm
	n := &softNode{t: t, dir: filepath.Join(root, "s"), machine: []string{"SOFTCUDA_DIR=" +
		filepath.Join(root, "machine"), "GORACE=atexit_sleep_ms=0"}}
	n.start(driver, args...)
	return n
}

// start starts the agent, again if it was ended.
func (n *softNode) start(driver []string, args ...string) {
	n.t.Helper()
	n.log.Reset()
	n.serve = kvagentCommand(n.t, append([]string{"serve", "--socket-dir", n.dir, "--pool", "16MiB"}, args...)...)
	n.serve.Env = append(append(n.serve.Env, n.machine...), driver...)
	n.serve.Stderr = &n.log
	if err := n.serve.Start(); err != nil {
		n.t.Fatal(err)
	}
	process := n.serve.Process
	// it has ended, unless the test failed
	n.t.Cleanup(func() { _ = process.Kill() })
	pooltest.Until(n.t, "the agent is ready", func() bool { return n.ready() == "ok" })
}

func (n *softNode) ready() string {
	body, err := adminclient.New(n.dir).Get(n.t.Context(), "/readyz")
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(body))
}

// end ends the agent in order and gives what it logged.
func (n *softNode) end() string {
	n.t.Helper()
	endServe(n.t, n.serve)
	return n.log.String()
}

// engine returns an engine on the machine, not yet started.
func (n *softNode) engine(device string, args ...string) *exec.Cmd {
	cmd := kvagentCommand(n.t, append([]string{"mock", "--device", device, "--socket-dir", n.dir, "--requests", "10",
		"--attach-within", "10s"}, args...)...)
	cmd.Env = append(cmd.Env, n.machine...)
	return cmd
}

// run runs an engine to its end and gives what it said.
func (n *softNode) run(device string, args ...string) (said string, err error) {
	out, err := n.engine(device, args...).CombinedOutput()
	return string(out), err
}

// served fails unless an engine on a CPU is served.
func (n *softNode) served() {
	n.t.Helper()
	if said, err := n.run("host"); err != nil {
		n.t.Errorf("an engine on a CPU: %v, %s", err, said)
	}
}

// agentStatus is what an agent says of itself.
func agentStatus(t *testing.T, dir string) (st admin.Status) {
	t.Helper()
	body, err := adminclient.New(dir).Get(t.Context(), "/status")
	if err == nil {
		err = json.Unmarshal(body, &st)
	}
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// gpuSays waits until a mover's device says of itself what is asked for.
func gpuSays(t *testing.T, dir, what string, is func(*cudaipc.CUDAInfo) bool) (i cudaipc.CUDAInfo) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Logf("the last that the device said is %+v", i)
		}
	}()
	pooltest.Until(t, what, func() bool {
		for _, m := range agentStatus(t, dir).Movers {
			if m.GPU != nil {
				if i = *m.GPU; is(&i) {
					return true
				}
			}
		}
		return false
	})
	return i
}

// series returns the value of a series of one mover.
func series(t *testing.T, dir, name string) float64 {
	t.Helper()
	body, err := adminclient.New(dir).Get(t.Context(), "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^` + name + `\{mover="[^"]*"\} (\S+)$`).FindSubmatch(body)
	if found == nil {
		t.Fatalf("no series %s", name)
	}
	v, err := strconv.ParseFloat(string(found[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// A mover's GPU is told in the log and in the metrics.
func TestCUDAPoolIsPinned(t *testing.T) {
	t.Parallel()
	n := newNode(t, nil)
	if said, err := n.run("cuda"); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	i := gpuSays(t, n.dir, "the pool is pinned", func(i *cudaipc.CUDAInfo) bool { return i.PinDone })
	if i.Pinned != i.Arena || i.Refused != 0 {
		t.Errorf("%+v", i)
	}
	if got := series(t, n.dir, "kvagent_gpu_pool_pinned_bytes"); int64(got) != i.Arena {
		t.Errorf("kvagent_gpu_pool_pinned_bytes is %g of %d", got, i.Arena)
	}
	if log := n.end(); !strings.Contains(log, "a GPU is open") || !strings.Contains(log, "the pool is pinned") {
		t.Errorf("the log does not say so:\n%s", log)
	}
}

// A pool that the driver does not pin is used all the same, through the rings, and that is told
// everywhere: so, too, while a piece is being pinned and does not come to an end.
func TestCUDAPoolThatIsNotPinned(t *testing.T) {
	t.Parallel()
	for name, knob := range map[string]string{"refused": "SOFTCUDA_FAIL=cuMemHostRegister:0:2",
		"not yet": "SOFTCUDA_HANG=cuMemHostRegister:1"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, []string{knob})
			if said, err := n.run("cuda", "--requests", "20"); err != nil {
				t.Fatalf("%v: %s", err, said)
			}
			i := gpuSays(t, n.dir, "copies go through the ring",
				func(i *cudaipc.CUDAInfo) bool { return i.RingBytes > 0 })
			if i.Pinned != 0 || i.PinDone != (name == "refused") {
				t.Errorf("%+v", i)
			}
			if got := series(t, n.dir, "kvagent_gpu_ring_bytes_total"); got == 0 ||
				series(t, n.dir, "kvagent_gpu_pool_pinned_bytes") != 0 {
				t.Errorf("kvagent_gpu_ring_bytes_total is %g", got)
			}
			i = gpuSays(t, n.dir, "the refusal is told", func(i *cudaipc.CUDAInfo) bool { return i.PinError != "" })
			if got := series(t, n.dir, "kvagent_gpu_pool_refused_bytes"); i.Refused != i.Arena ||
				int64(got) != i.Arena || !strings.Contains(i.PinError, "cuMemHostRegister") {
				t.Errorf("refused bytes %g, %+v", got, i)
			}
			if out, _ := kvagentOutput(t, "status", "--socket-dir", n.dir); !strings.Contains(out,
				"REFUSED (cuMemHostRegister") {
				t.Errorf("status does not say it:\n%s", out)
			}
			if name == "not yet" {
				_ = n.serve.Process.Kill() // a mover whose driver hangs does not end in order
				_ = n.serve.Wait()
			} else {
				n.end()
			}
			if log := n.log.String(); strings.Count(log, "does not pin all of the pool") != 1 ||
				!strings.Contains(log, "ulimit -l") {
				t.Errorf("the log does not say it once, with the cure:\n%s", log)
			}
		})
	}
}

// The driver's refusal to open a GPU or an engine's memory reaches the engine with a remedy, and
// engines on CPUs are still served.
func TestCUDARefusalsNameTheCure(t *testing.T) {
	t.Parallel()
	for knob, want := range map[string][]string{
		"cuInit:0:803":                 {"cuInit", "restart the container"},
		"cuInit:0:999":                 {"cuInit", "dmesg"},
		"cuDevicePrimaryCtxRetain:0:2": {"cuDevicePrimaryCtxRetain", "gpu_memory_utilization"},
		"cuIpcOpenMemHandle:0:1": {"cuIpcOpenMemHandle", "expandable_segments", "hostIPC", "hostPID",
			"sleep mode"},
		"cuIpcOpenMemHandle:0:2":               {"cuIpcOpenMemHandle", "gpu_memory_utilization"},
		"cuIpcOpenMemHandle:0:400":             {"cuIpcOpenMemHandle", "namespace", "same GPU"},
		"cuIpcOpenEventHandle:0:1":             {"cuIpcOpenEventHandle", "interprocess=True"},
		"cuMemImportFromShareableHandle:0:801": {"cuMemImportFromShareableHandle"},
	} {
		t.Run(knob, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, []string{"SOFTCUDA_FAIL=" + knob})
			device := "cuda"
			if strings.HasPrefix(knob, "cuMemImport") {
				device = "cuda-virtual"
			}
			said, err := n.run(device, "--attach-within", "2s")
			if err == nil {
				t.Fatal("the engine was served")
			}
			for _, words := range want {
				if !strings.Contains(said, words) {
					t.Errorf("the engine is not told %q: %s", words, said)
				}
			}
			n.served()
			if now := n.ready(); now != "ok" {
				t.Errorf("readyz: %s", now)
			}
			n.end()
		})
	}
}

// A GPU of which the mover sees another one is refused by its UUID.
func TestCUDAAnotherGPU(t *testing.T) {
	t.Parallel()
	n := newNode(t, []string{"SOFTCUDA_FIRST_DEVICE=1"})
	if said, err := n.run("cuda", "--attach-within", "2s"); err == nil ||
		!strings.Contains(said, "not among those that this process sees") || !strings.Contains(said, "by its UUID") {
		t.Errorf("%v: %s", err, said)
	}
	n.end()
}

// A driver call that does not return costs its process, in bounded time; the engine is told what
// hangs and what to do, and others are served on.
func TestCUDAHangs(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ knob, says string }{
		{"cuInit:1", "open the device"}, {"cuDevicePrimaryCtxRetain:1", "open the device"},
		{"cuIpcOpenMemHandle:1", "import of an engine"},
	} {
		t.Run(test.knob, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, []string{"SOFTCUDA_HANG=" + test.knob, testLimits + "=gpu-start=3s,gpu-import=2s"})
			said, err := n.run("cuda", "--attach-within", "8s")
			if err == nil {
				t.Errorf("the engine was served: %s", said)
			}
			n.served()
			_ = n.serve.Process.Kill()
			_ = n.serve.Wait() // it was killed
			// An engine that asks again while the first answer is out, on a busy machine, is told
			// that only; the log has all.
			if said += n.log.String(); !strings.Contains(said, "did not answer in time: "+test.says) ||
				!strings.Contains(said, "gpu-reset") {
				t.Errorf("neither the engine nor the log is told what hangs: %s", said)
			}
		})
	}
}

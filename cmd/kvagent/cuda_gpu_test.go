//go:build cuda && softcuda

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/cudaipc"
)

// faultyServe starts an agent whose movers have a driver with faults, or other settings in their environment. Engines have none.
func faultyServe(t *testing.T, environment map[string]string, args ...string) (dir string, log fmt.Stringer) {
	t.Helper()
	for name, value := range environment {
		t.Setenv(name, value)
	}
	_, dir, buffer := startServe(t, append([]string{"--pool", "64MiB"}, args...)...)
	for name := range environment {
		if err := os.Unsetenv(name); err != nil {
			t.Fatal(err)
		}
	}
	return dir, buffer
}

// runMock runs an engine to its end and gives what it said.
func runMock(t *testing.T, dir, device string, args ...string) (said string, code int) {
	t.Helper()
	return kvagentOutput(t, append([]string{"mock", "--device", device, "--socket-dir", dir, "--requests", "10", "--attach-within", "10s"}, args...)...)
}

// agentStatus is what an agent says of itself.
func agentStatus(t *testing.T, dir string) (st agent.Status) {
	t.Helper()
	body, err := newAdmin(dir).get(t.Context(), "/status")
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
	for limit := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) { // between two questions to another process
		for _, m := range agentStatus(t, dir).Movers {
			if len(m.Info) > 0 && json.Unmarshal(m.Info, &i) == nil && is(&i) {
				return i
			}
		}
		if time.Now().After(limit) {
			t.Fatalf("%s: the last that the device said is %+v", what, i)
		}
	}
}

// series is the value of a series of one mover.
func series(t *testing.T, dir, name string) float64 {
	t.Helper()
	body, err := newAdmin(dir).get(t.Context(), "/metrics")
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

// The first engine on a type of GPU has it measured, and what the mover takes of it; the next agent has the table from the file. A file that
// is broken is measured again.
func TestCUDAMeasuredAtTheFirstStart(t *testing.T) {
	const own = 3 << 20
	softMachine(t)
	t.Setenv("SOFTCUDA_CONTEXT_BYTES", strconv.Itoa(own))
	file := filepath.Join(t.TempDir(), "tables.json")
	if err := os.WriteFile(file, []byte("[{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, want := range []cudaipc.TableSource{cudaipc.TableMeasured, cudaipc.TableKnown} {
		serve, dir, log := startServe(t, "--copy-tables", file)
		if said, code := runMock(t, dir, "cuda"); code != 0 {
			t.Fatalf("exit %d: %s", code, said)
		}
		i := gpuSays(t, dir, "the pool is pinned", func(i *cudaipc.CUDAInfo) bool { return i.PinDone })
		if i.Source != want || i.Facts.Context != own || i.Facts.Problem != "" || i.Pinned != i.Arena || i.Refused != 0 {
			t.Errorf("%+v, want a table that is %s, and %d bytes", i, want, own)
		}
		if n := series(t, dir, "kvagent_gpu_own_bytes"); n != own {
			t.Errorf("kvagent_gpu_own_bytes is %g", n)
		}
		if n := series(t, dir, "kvagent_gpu_pool_pinned_bytes"); int64(n) != i.Arena {
			t.Errorf("kvagent_gpu_pool_pinned_bytes is %g of %d", n, i.Arena)
		}
		endServe(t, serve)
		if said := map[cudaipc.TableSource]string{cudaipc.TableMeasured: "measured now", cudaipc.TableKnown: "measured before"}[want]; !strings.Contains(log.String(), said) ||
			!strings.Contains(log.String(), i.Paths) || !strings.Contains(log.String(), "the pool is pinned") || strings.Contains(log.String(), "measured again") != (want == cudaipc.TableMeasured) {
			t.Errorf("the log does not say %q and %q:\n%s", said, i.Paths, log)
		}
	}
	if tables, err := readCopyTables(file); err != nil || len(tables) != 1 || tables[0].Version != cudaipc.CopyTableVersion || tables[0].Driver == 0 {
		t.Errorf("%+v, %v", tables, err)
	}
}

// A pool that the driver does not pin is used all the same, through the rings, and that is told everywhere: so, too, while a piece is
// being pinned and does not come to an end.
func TestCUDAPoolThatIsNotPinned(t *testing.T) {
	for _, fault := range []struct{ name, environment, knob string }{{"refused", "SOFTCUDA_FAIL", "cuMemHostRegister:0:2"}, {"not yet", "SOFTCUDA_HANG", "cuMemHostRegister:1"}} {
		t.Run(fault.name, func(t *testing.T) {
			softMachine(t)
			dir, log := faultyServe(t, map[string]string{fault.environment: fault.knob})
			if said, code := runMock(t, dir, "cuda", "--requests", "20"); code != 0 || strings.Contains(said, `"wrong_bytes":1`) {
				t.Fatalf("exit %d: %s", code, said)
			}
			i := gpuSays(t, dir, "copies go through the ring", func(i *cudaipc.CUDAInfo) bool { return i.RingBytes > 0 })
			if i.Pinned != 0 || i.PinDone != (fault.name == "refused") {
				t.Errorf("%+v", i)
			}
			if n := series(t, dir, "kvagent_gpu_ring_bytes_total"); n == 0 || series(t, dir, "kvagent_gpu_pool_pinned_bytes") != 0 {
				t.Errorf("kvagent_gpu_ring_bytes_total is %g", n)
			}
			i = gpuSays(t, dir, "the refusal is told", func(i *cudaipc.CUDAInfo) bool { return i.PinError != "" })
			if n := series(t, dir, "kvagent_gpu_pool_refused_bytes"); i.Refused != i.Arena || int64(n) != i.Arena || !strings.Contains(i.PinError, "cuMemHostRegister") {
				t.Errorf("refused bytes %g, %+v", n, i)
			}
			if out, _ := kvagentOutput(t, "status", "--socket-dir", dir); !strings.Contains(out, "REFUSED (cuMemHostRegister") {
				t.Errorf("status does not say it:\n%s", out)
			}
			if said := log.String(); strings.Count(said, "does not pin all of the pool") != 1 || !strings.Contains(said, "ulimit -l") {
				t.Errorf("the log does not say it once, with the cure:\n%s", said)
			}
		})
	}
}

// What the driver refuses when a GPU or an engine's memory is opened is told to the engine with what to do about it, and engines on
// CPUs are served on.
func TestCUDARefusalsNameTheCure(t *testing.T) {
	for knob, want := range map[string][]string{
		"cuInit:0:803":                         {"cuInit", "restart the container"},
		"cuInit:0:999":                         {"cuInit", "dmesg"},
		"cuDevicePrimaryCtxRetain:0:2":         {"cuDevicePrimaryCtxRetain", "gpu_memory_utilization"},
		"cuIpcOpenMemHandle:0:1":               {"cuIpcOpenMemHandle", "expandable_segments", "hostIPC", "hostPID", "sleep mode"},
		"cuIpcOpenMemHandle:0:2":               {"cuIpcOpenMemHandle", "gpu_memory_utilization"},
		"cuIpcOpenMemHandle:0:400":             {"cuIpcOpenMemHandle", "namespace", "same GPU"},
		"cuIpcOpenEventHandle:0:1":             {"cuIpcOpenEventHandle", "interprocess=True"},
		"cuMemImportFromShareableHandle:0:801": {"cuMemImportFromShareableHandle"},
	} {
		t.Run(knob, func(t *testing.T) {
			softMachine(t)
			dir, _ := faultyServe(t, map[string]string{"SOFTCUDA_FAIL": knob})
			device := "cuda"
			if strings.HasPrefix(knob, "cuMemImport") {
				device = "cuda-virtual"
			}
			said, code := runMock(t, dir, device, "--attach-within", "1s")
			if code == 0 {
				t.Fatal("the engine was served")
			}
			for _, words := range want {
				if !strings.Contains(said, words) {
					t.Errorf("the engine is not told %q: %s", words, said)
				}
			}
			if said, code := runMock(t, dir, "host"); code != 0 {
				t.Errorf("an engine on a CPU: exit %d, %s", code, said)
			}
			if body, err := newAdmin(dir).get(t.Context(), "/readyz"); err != nil || strings.TrimSpace(string(body)) != "ok" {
				t.Errorf("readyz: %s %v", body, err)
			}
		})
	}
}

// A GPU of which this process sees another one is refused by its UUID.
func TestCUDAAnotherGPU(t *testing.T) {
	softMachine(t)
	t.Setenv("SOFTCUDA_DEVICES", "1")
	dir, _ := faultyServe(t, map[string]string{"SOFTCUDA_FIRST_DEVICE": "1"})
	if said, code := runMock(t, dir, "cuda", "--attach-within", "1s"); code == 0 || !strings.Contains(said, "not among those that this process sees") || !strings.Contains(said, "by its UUID") {
		t.Errorf("exit %d: %s", code, said)
	}
}

// A driver call that does not return costs its process, in bounded time; the engine is told what hangs and what to do, and others are
// served on. Where it hangs only while the GPU is measured, nothing is lost but the measure.
func TestCUDAHangs(t *testing.T) {
	softMachine(t) // says what is missing; each case has a machine of its own, for they run beside each other
	for _, test := range []struct{ knob, says string }{
		{"cuInit:1", "open the device"}, {"cuDevicePrimaryCtxRetain:1", "open the device"}, {"cuIpcOpenMemHandle:1", "import of peer"}, {"cuMemAlloc:1", ""},
	} {
		t.Run(test.knob, func(t *testing.T) {
			t.Parallel()
			dir, machine := t.TempDir(), "SOFTCUDA_DIR="+t.TempDir()
			serve := kvagentCommand(t, "serve", "--socket-dir", dir, "--pool", "16MiB", "--gpu-start-within", "3s", "--gpu-import-within", "2s", "--copy-tables", filepath.Join(dir, "tables.json"))
			serve.Env = append(serve.Env, machine, "SOFTCUDA_HANG="+test.knob)
			if err := serve.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				_ = serve.Process.Kill()
				_ = serve.Wait() // it was killed
			})
			engine := func(device string) (string, error) {
				cmd := kvagentCommand(t, "mock", "--device", device, "--socket-dir", dir, "--requests", "10", "--attach-within", "12s")
				cmd.Env = append(cmd.Env, machine)
				said, err := cmd.CombinedOutput()
				return string(said), err
			}
			said, err := engine("cuda")
			if test.says == "" {
				i := gpuSays(t, dir, "the GPU was not measured", func(i *cudaipc.CUDAInfo) bool { return i.Facts.Problem != "" })
				if err != nil || i.Source != cudaipc.TableDefault {
					t.Errorf("%v, %s, %+v", err, said, i)
				}
			} else if err == nil || !strings.Contains(said, "did not answer in time: "+test.says) || !strings.Contains(said, "gpu-reset") {
				t.Errorf("the engine is told: %v, %s", err, said)
			}
			if said, err := engine("host"); err != nil {
				t.Errorf("an engine on a CPU: %v, %s", err, said)
			}
		})
	}
}

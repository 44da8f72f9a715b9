//go:build cuda && softcuda

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/proof"
)

// These tests are of the whole path through the CUDA code, on a software driver: KVAGENT_LIBCUDA
// names it, `make test-cuda` runs them.

// backWithinMS is how long the GPU may be short of a dead process's memory.
const backWithinMS = 2000

// softMachine is a pretended machine with a GPU, of this test alone. stat reads one of its
// counters.
func softMachine(t *testing.T) (stat func(name string) int64) {
	t.Helper()
	library := os.Getenv("KVAGENT_LIBCUDA")
	if library == "" {
		t.Fatal("KVAGENT_LIBCUDA names no software driver: run `make test-cuda`")
	}
	dir, err := os.MkdirTemp("/dev/shm", "kvagent-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	t.Setenv("SOFTCUDA_DIR", dir)
	t.Setenv("GORACE", "atexit_sleep_ms=0")
	watchLag(t)
	return func(name string) int64 {
		out, err := exec.Command(filepath.Join(filepath.Dir(library), "softcuda-stat")).Output()
		if err != nil {
			t.Fatalf("softcuda-stat: %v", err)
		}
		for line := range strings.Lines(string(out)) {
			if value, found := strings.CutPrefix(line, name+" "); found {
				n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
		}
		t.Fatalf("softcuda-stat has no %s:\n%s", name, out)
		return 0
	}
}

// Engines, the agent and its mover die, copies under way or not: no request fails, no byte is
// wrong, nothing stays open.
func TestCUDAReplayKills(t *testing.T) {
	stat := softMachine(t)
	o := replayJSON(t, "requests: 120", "device: cuda", "kill-engine-every: 30", "kill-agent-every: 70",
		"kill-mover-every: 25")
	o.clean(t)
	if o.Requests != 120 || o.BlocksLoaded == 0 || o.EngineKills == 0 || o.AgentKills == 0 || o.MoverKills == 0 {
		t.Errorf("%d requests of 120, %d blocks loaded, %d engines, %d agents and %d movers killed", o.Requests,
			o.BlocksLoaded, o.EngineKills, o.AgentKills, o.MoverKills)
	}
	o.cleanedUp(t)
	for _, name := range []string{"allocated_bytes", "wait_events", "device_syncs"} {
		if n := stat(name); n != 0 {
			t.Errorf("%s: %d when all is over", name, n)
		}
	}
}

// With the agent and its mover still there, nothing of engines that have left or were killed is
// open in the driver.
func TestCUDANothingStaysOpen(t *testing.T) {
	stat := softMachine(t)
	serve, dir, _ := startServe(t, "--device", "cuda", "--pool", "256MiB")
	o := replayJSON(t, "requests: 50", "device: cuda", "socket: "+dir, "kill-engine-every: 20")
	o.clean(t)
	if o.ImportsLeft != 0 {
		t.Errorf("%d imports are open, as the mover says", o.ImportsLeft)
	}
	if n := stat("processes"); n != 1 {
		t.Errorf("%d processes with a driver, want the mover", n)
	}
	for _, name := range []string{"allocated_bytes", "imports", "open_events", "vmm_handles", "vmm_maps"} {
		if n := stat(name); n != 0 {
			t.Errorf("%s: %d without an engine", name, n)
		}
	}
	endServe(t, serve)
}

// mockEngine starts an engine that saves and loads and then stays.
func mockEngine(t *testing.T, dir, device string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := kvagentCommand(t,
		append([]string{"mock", "--device", device, "--socket-dir", dir, "--requests", "20", "--hold"}, args...)...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // it has ended, unless the test failed
	return cmd
}

// isBack waits until the memory of dead processes is free again, fails if that is too late, and
// says how long it took.
func isBack(t *testing.T, stat func(string) int64, what string, died time.Time) time.Duration {
	t.Helper()
	pooltest.Until(t, what+" died, and its memory is free again", func() bool {
		return stat("allocated_bytes") == 0 && stat("imports") == 0
	})
	return inTime(t, what+": its memory was free", died)
}

// inTime fails if what follows a death took longer than promised on a machine that does not stand
// still, and says how long it took.
func inTime(t *testing.T, what string, died time.Time) time.Duration {
	t.Helper()
	took := time.Since(died)
	if most := backWithinMS*time.Millisecond + busyFactor*time.Duration(machineLag.Load()); took > most {
		t.Errorf("%s %v after the death, allowed: %v", what, took, most)
	}
	return took
}

// machineLag is by how much a sleep lasted too long at most, in nanoseconds, since the test began.
var machineLag atomic.Int64

// watchLag measures machineLag until the test ends.
func watchLag(t *testing.T) {
	const pause = 10 * time.Millisecond
	machineLag.Store(0)
	ended, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTimer(pause)
		for began := time.Now(); ; {
			select {
			case <-ended:
				return
			case <-tick.C:
			}
			now := time.Now()
			machineLag.Store(max(machineLag.Load(), int64(now.Sub(began)-pause)))
			began = now
			tick.Reset(pause)
		}
	}()
	t.Cleanup(func() { close(ended); <-stopped })
}

// A killed engine's memory is free again, whether it was copied, or had not even registered: the
// agent sees the death without a time-out and lets go.
func TestCUDAMemoryBackFromEngines(t *testing.T) {
	stat := softMachine(t)
	_, dir, _ := startServe(t, "--device", "cuda", "--pool", "64MiB")
	seed := uint64(time.Now().UnixNano())
	rng := rand.New(rand.NewPCG(seed, 1))
	t.Logf("seed %d", seed)
	var longest time.Duration
	toJobs := map[string]int{} // by device, calls of the driver from an engine's start to its first jobs
	for i := range deaths(20, 100) {
		device := []string{"cuda", "cuda-virtual"}[i%2]
		list := filepath.Join(t.TempDir(), "calls")
		t.Setenv("SOFTCUDA_CALLS", list)
		calls := func() int {
			text, _ := os.ReadFile(list) // there is none before the first call
			return bytes.Count(text, []byte("\n"))
		}
		var what string
		var cmd *exec.Cmd
		if i%4 < 2 {
			what = "an engine with a job under way"
			cmd = mockEngine(t, dir, device, "--kill-self-after", strconv.Itoa(1+rng.IntN(4)), "--seed",
				strconv.Itoa(i+1))
			_ = cmd.Wait() // it was killed
			toJobs[device] = calls()
		} else {
			at := rng.IntN(toJobs[device] + 1)
			what = fmt.Sprintf("an engine with %d of %d calls before its first jobs", at, toJobs[device])
			cmd = mockEngine(t, dir, device, "--seed", strconv.Itoa(i+1))
			pooltest.Until(t, what, func() bool { return calls() >= at })
			_ = cmd.Process.Kill()
			_ = cmd.Wait() // it was killed
		}
		longest = max(longest, isBack(t, stat, what, time.Now()))
	}
	t.Logf("longest %v", longest)
}

// deaths returns how often each kind of process is killed in a test: often with
// KVAGENT_CUDA_LONG=1.
func deaths(short, long int) int {
	if os.Getenv("KVAGENT_CUDA_LONG") == "1" {
		return long
	}
	return short
}

// A killed mover, and a killed agent, hold nothing of an engine that ends later, and take nothing
// from one that lives.
func TestCUDAMemoryBackFromAgents(t *testing.T) {
	stat := softMachine(t)
	var longest time.Duration
	for i := range 2 * deaths(3, 25) {
		serve, dir, _ := startServe(t, "--device", "cuda", "--pool", "64MiB")
		engine := mockEngine(t, dir, []string{"cuda", "cuda-virtual"}[i/2%2])
		mover := moverOf(t, dir)
		held := stat("allocated_bytes")
		what, ofAgent := "a mover", i%2 == 0
		if ofAgent {
			what = "an agent"
			_ = serve.Process.Kill()
			_ = serve.Wait() // it was killed
		} else if err := syscall.Kill(mover, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		died := time.Now()
		if ofAgent {
			pooltest.Until(t, "the mover ends with its agent", func() bool { return stat("processes") <= 1 })
			inTime(t, "the mover had ended", died)
		}
		if now := stat("allocated_bytes"); now != held {
			t.Errorf("%s died: the engine had %d bytes and has %d", what, held, now)
		}
		_ = engine.Process.Kill()
		_ = engine.Wait() // it was killed
		longest = max(longest, isBack(t, stat, what, time.Now()))
		_ = serve.Process.Kill()
		_ = serve.Wait()
	}
	t.Logf("longest %v", longest)
}

// moverOf waits for the mover of an agent that has an engine's memory open.
func moverOf(t *testing.T, dir string) int {
	t.Helper()
	pid := 0
	pooltest.Until(t, "a mover has an engine's memory open", func() bool {
		st := statusOf(t, dir)
		for i := range st.Movers {
			if st.Movers[i].Running && st.Movers[i].Peers > 0 && st.Engines > 0 {
				pid = st.Movers[i].PID
			}
		}
		return pid != 0
	})
	return pid
}

// proofJSON runs a quick proof.
func proofJSON(t *testing.T, args ...string) (r proof.Report, code int) {
	t.Helper()
	cmd := kvagentCommand(t, append([]string{"proof", "--quick", "--json"}, args...)...)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	_ = cmd.Run() // its code is judged
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatalf("proof %v printed no object: %v\n%s%s", args, err, out.String(), log.String())
	}
	return r, cmd.ProcessState.ExitCode()
}

// Every check passes on a driver that does what it should, and nothing is left.
func TestCUDAProof(t *testing.T) {
	stat := softMachine(t)
	r, code := proofJSON(t)
	if code != 0 || !r.OK || len(r.Lines) != len(proof.Names()) || r.UUID == "" {
		t.Errorf("exit %d, ok %v, %d checks of %d, GPU %q", code, r.OK, len(r.Lines), len(proof.Names()), r.UUID)
	}
	for _, l := range r.Lines {
		t.Logf("%s: %v %s %s", l.Name, l.OK, l.Text, l.Error)
	}
	for _, name := range []string{"processes", "allocated_bytes", "imports"} {
		if n := stat(name); n != 0 {
			t.Errorf("%s: %d behind the proof", name, n)
		}
	}
}

// A driver that loses a process fails the check that it is of, and the others are done all the
// same, in processes of their own. Targets are no failure unless asked for.
func TestCUDAProofFails(t *testing.T) {
	softMachine(t)
	if _, code := proofJSON(t, "--check", "transfer", "--strict"); code != exitFailed {
		t.Errorf("exit %d with --strict, want %d: a software driver does not reach 23 GiB/s in fragments of 4 KiB",
			code, exitFailed)
	}
	t.Setenv("SOFTCUDA_FAIL", "cuMemImportFromShareableHandle:0:700") // no later call of the process survives it
	r, code := proofJSON(t)
	if code != exitFailed || r.OK || len(r.Lines) != len(proof.Names()) {
		t.Errorf("exit %d, ok %v, %d checks", code, r.OK, len(r.Lines))
	}
	for _, l := range r.Lines {
		if failed := l.Name == "import" || l.Name == "warm-up-killed"; l.OK == failed {
			t.Errorf("%s: ok %v %s, though virtual memory cannot be imported", l.Name, l.OK, l.Error)
		}
	}
}

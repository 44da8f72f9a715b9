package mover_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
)

// TestAgentDies expects an agent's mover to end after it, also during a copy that never ends, and
// if the mover is stopped, and the proof of its end to come only then.
func TestAgentDies(t *testing.T) {
	const stopped = "stopped"
	for _, what := range []string{cudaipc.HostDevice, hangsInDone, stopped} {
		t.Run(what, func(t *testing.T) {
			device := what
			if what == stopped {
				device = cudaipc.HostDevice
			}
			agent, mover, proof := startAgent(t, device)
			moverFD, err := unix.PidfdOpen(mover, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = unix.Close(moverFD) }()
			// startAgent has waited for a copy to be submitted, after the import
			if ended(t, int(proof.Fd()), 0) {
				t.Error("the proof ended while the regions were open")
			}
			if what == stopped {
				devicetest.Freeze(t, mover)
			}
			if err := agent.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = agent.Wait() // it was killed
			if !ended(t, int(proof.Fd()), testTimeout) {
				t.Error("the agent is dead and the proof has not ended")
			}
			awaitEnd(t, moverFD)
		})
	}
}

// awaitEnd waits until the process of a pidfd has ended.
func awaitEnd(t *testing.T, pidfd int) {
	t.Helper()
	if !readable(t, pidfd, testTimeout) {
		t.Fatal("the agent is dead and its mover lives")
	}
}

// TestMoverHoldsTheProof expects the proof to be held from Import to Close, with and without a
// mover.
func TestMoverHoldsTheProof(t *testing.T) {
	f := devicetest.Host(t, devicetest.MinArena, cudaipc.KindFD)
	m := newFixture(t, nil)
	for name, device := range map[string]cudaipc.Device{"host": f.Device, "mover": m.mover} {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		im := m.imports(1)
		im.Proof = pair[1]
		peer, err := device.Import(im)
		if err != nil {
			t.Fatal(err)
		}
		ticket, err := peer.Copy(&cudaipc.Copy{
			Runs: []cudaipc.Run{{Region: 1, Len: 4096}}, Blocks: []cudaipc.Block{{Runs: 1}},
		})
		if err != nil {
			t.Fatal(err)
		}
		// what would close it at the end of the import has run before a copy has ended
		if d, ok, err := ticket(testTimeout); !ok || err != nil || d.Err != nil {
			t.Fatalf("%s: copy: %v, %v, %v", name, ok, err, d.Err)
		}
		if ended(t, pair[0], 0) {
			t.Errorf("%s: the proof ended while the regions were open", name)
		}
		if err := peer.Close(); err != nil {
			t.Fatal(err)
		}
		if !ended(t, pair[0], testTimeout) {
			t.Errorf("%s: the proof did not end with the regions", name)
		}
		_ = unix.Close(pair[0])
	}
}

// TestRefusedImportClosesTheProof, so that a session's end is seen.
func TestRefusedImportClosesTheProof(t *testing.T) {
	m := newFixture(t, nil)
	for name, spoil := range map[string]func(*cudaipc.Import){
		"here":  func(im *cudaipc.Import) { im.Regions[0].Size = 1 << 62 },
		"there": func(im *cudaipc.Import) { im.Regions[1].Kind = cudaipc.KindCUDA },
	} {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		im := m.imports(1)
		im.Proof = pair[1]
		if spoil(&im); im.Regions[1].Kind == cudaipc.KindCUDA {
			_ = unix.Close(im.Regions[1].FD)
		}
		if m.imported(1, im) == nil {
			t.Errorf("Import refused %s: no error", name)
		}
		if !ended(t, pair[0], testTimeout) {
			t.Errorf("Import refused %s: the proof did not end", name)
		}
		_ = unix.Close(pair[0])
	}
	m.works()
}

// TestHundredRestarts expects a restart to leave no descriptor, mapping or goroutine on either
// side.
func TestHundredRestarts(t *testing.T) {
	m := newFixture(t, nil)
	m.works()
	fds, goroutines := entries(t, "/proc/self/fd"), runtime.NumGoroutine()
	defer m.watchStates()()
	restarts := 100
	if testing.Short() {
		restarts = 20
	}
	for i := range restarts {
		if err := unix.Kill(m.pid(), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		m.lostProcess(uint64(i + 1))
		m.works()
	}
	theirs := fmt.Sprintf("/proc/%d/fd", m.pid())
	before := entries(t, theirs)
	for range 20 {
		m.works()
	}
	if n := entries(t, theirs); n > before {
		t.Errorf("the mover has %d descriptors, %d before 20 more peers", n, before)
	}
	if n := entries(t, "/proc/self/fd"); n > fds+2 {
		t.Errorf("%d descriptors, %d before", n, fds)
	}
	if n := runtime.NumGoroutine(); n > goroutines+2 {
		t.Errorf("%d goroutines, %d before", n, goroutines)
	}
}

// askEvery is the pause of watchStates between two questions, which leaves the processor to the
// restarts that it asks beside.
const askEvery = 100 * time.Microsecond

// watchStates asks for the mover's state again and again, as /status may at any moment, until the
// returned function is called.
func (m *fixture) watchStates() (stop func()) {
	var watching sync.WaitGroup
	ended := make(chan struct{})
	watching.Go(func() {
		pause := time.NewTicker(askEvery)
		defer pause.Stop()
		for {
			select {
			case <-ended:
				return
			case <-pause.C:
				m.mover.Movers()
			}
		}
	})
	return func() {
		close(ended)
		watching.Wait()
	}
}

// lostProcess waits until n processes were lost.
func (m *fixture) lostProcess(n uint64) {
	m.t.Helper()
	devicetest.Until(m.t, fmt.Sprintf("%d processes have crashed", n), func() bool {
		s := m.mover.Movers()[0]
		return s.Lost[cudaipc.LostCrash] == n && s.PID == 0
	})
}

func entries(t *testing.T, dir string) int {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// TestMoverIsAlone expects a mover to have none of this process's descriptors, not to be in its
// group, and to end at no signal but SIGKILL.
func TestMoverIsAlone(t *testing.T) {
	leaked, err := unix.MemfdCreate("inherited", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(leaked) }()
	m := newFixture(t, nil)
	m.attach(1)
	pid := m.pid()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		if to, _ := os.Readlink(filepath.Join(dir, e.Name())); strings.Contains(to, "inherited") {
			t.Errorf("descriptor %s is inherited: %s", e.Name(), to)
		}
	}
	if group, err := unix.Getpgid(pid); err != nil || group == unix.Getpgrp() {
		t.Errorf("process group %d (%v), this one's is %d", group, err, unix.Getpgrp())
	}
	for _, s := range []unix.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT} {
		if err := unix.Kill(pid, s); err != nil {
			t.Fatal(err)
		}
	}
	if d := m.done(m.submit(1, 1)[0]); d.Err != nil || m.pid() != pid {
		t.Errorf("after SIGINT, SIGTERM, SIGHUP and SIGQUIT: %v, process %d, was %d", d.Err, m.pid(), pid)
	}
	if err := m.peer(1).Close(); err != nil {
		t.Error(err)
	}
}

// TestMostRuns sends copies that take many packets, both ways at once.
func TestMostRuns(t *testing.T) {
	const run, runs = 64, regionSize / 64
	m := newFixture(t, func(o *mover.Options) { o.Limits = mover.Limits{} })
	m.attach(1)
	c := &cudaipc.Copy{Sum: true}
	for i := range runs {
		at := uint64(i) * 40503 % runs * run // all of them, out of order
		c.Runs = append(c.Runs, cudaipc.Run{Region: 1, RegionOff: at, ArenaOff: int64(at), Len: run})
		c.Blocks = append(c.Blocks, cudaipc.Block{Runs: 1})
	}
	back := &cudaipc.Copy{Dir: cudaipc.Scatter, Runs: c.Runs[:1], Blocks: c.Blocks[:1]}
	first, err := m.peer(1).Copy(c)
	if err != nil {
		t.Fatal(err)
	}
	if d := m.done(first); d.Err != nil || len(d.Sums) != runs {
		t.Fatalf("%v, %d sums of %d", d.Err, len(d.Sums), runs)
	}
	second, err := m.peer(1).Copy(back)
	if err != nil {
		t.Fatal(err)
	}
	m.done(second)
	want := make([]byte, regionSize)
	devicetest.Pattern(want, 3, 0)
	if !bytes.Equal(m.arena[:regionSize], want) {
		t.Error("the arena has other bytes than the region")
	}
	if err := m.peer(1).Close(); err != nil {
		t.Error(err)
	}
}

// TestMoverIsBound expects a mover to be bound to its node and to report it, and with a node that
// does not exist to report that and work.
func TestMoverIsBound(t *testing.T) {
	for node, want := range map[int]string{0: "node 0", 999: "node 999: not bound"} {
		if _, err := os.Stat("/sys/devices/system/node/node0"); err != nil && node == 0 {
			continue
		}
		m := newFixture(t, func(o *mover.Options) { o.Node = node })
		m.works()
		if got := m.mover.Movers()[0].Node; !strings.HasPrefix(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestMoverIsToldTheStep expects the mover to learn the step, because its device asks an event only
// once the step is reached.
func TestMoverIsToldTheStep(t *testing.T) {
	m := newFixture(t, func(o *mover.Options) { o.Device, o.AskEvents = firesForAStep, true })
	m.attach(1)
	for _, op := range []devicetest.Op{
		{Kind: devicetest.SetStep, Step: 1 << 40}, {Kind: devicetest.Record}, {Kind: devicetest.Synchronize},
	} {
		if _, err := m.engine.Do(op); err != nil {
			t.Fatal(err)
		}
	}
	s, err := m.peer(1).Poll(cudaipc.Wait{Revoke: cudaipc.None, Step: 1 << 40})
	if err != nil || !s.Fired || s.Step != 1<<40 {
		t.Fatalf("%+v, %v: the step did not reach the device in the mover", s, err)
	}
}

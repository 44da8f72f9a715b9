package agent

import (
	"errors"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
	"github.com/kvagent/kvagent/ipc"
)

// hangUp are limits that a test can wait for.
var hangUp = mover.Options{Limits: mover.Limits{
	Tick: 20 * time.Millisecond, Ping: 3 * time.Second, Steady: time.Nanosecond,
}}

// moverPid waits for the mover to run.
func (r *rig) moverPid() (pid int) {
	r.t.Helper()
	r.waitFor("a mover runs", func(st admin.Status) bool {
		pid = st.Movers[0].PID
		return pid != 0
	})
	return pid
}

// A mover that dies ends the sessions whose memory it had, with the reason; they register again and
// all is as before.
func TestLostMoverEndsItsSessions(t *testing.T) {
	r := newRig(t, withMover(hangUp))
	for round := range 3 {
		scheduler, workers, _ := r.joinEngine(register("engine"))
		w := workers[0]
		w.fill(3, byte(round+1))
		if got := w.save(1, chain(byte(round), 1), 3); !all(got, blockOK) {
			t.Fatalf("save %v", got)
		}
		if got := w.load(1, 0, chain(byte(round), 1), 5); !all(got, blockOK) || !w.filled(5, byte(round+1)) {
			t.Fatalf("load %v", got)
		}
		check(t, unix.Kill(r.moverPid(), unix.SIGKILL))
		why := next[*ipc.Error](w)
		if why.Code != ipc.ErrCodeInternal || !strings.Contains(why.Text, "mover host was lost (crash)") ||
			!strings.Contains(why.Text, "register again") {
			t.Errorf("ERROR %+v, want the cause and what to do", why)
		}
		scheduler.send(&ipc.Ping{Req: 9})
		next[*ipc.Pong](scheduler) // has no memory in the mover
		scheduler.close()
		r.waitFor("the engine is gone", func(st admin.Status) bool { return st.Sessions == 0 && st.Regions == 0 })
	}
	st := r.guests.Status().Movers[0]
	if st.Starts != 3 || st.Lost["crash"] != 3 || !strings.Contains(st.LastLoss, "crash") {
		t.Errorf("%+v, want 3 starts and 3 losses", st)
	}
	text := r.metricsText()
	for _, line := range []string{
		`kvagent_mover_lost_total{mover="host",reason="crash"} 3`,
		`kvagent_mover_lost_total{mover="host",reason="ping"} 0`,
		`kvagent_mover_starts_total{mover="host"} 3`, `kvagent_session_ends_total{reason="device"} 3`,
	} {
		if !strings.Contains(text, line) {
			t.Errorf("metrics have no %s", line)
		}
	}
}

func (r *rig) metricsText() string {
	_, text := r.admin("GET", "/metrics")
	return text + "\n"
}

// No fence comes while a mover that stands still may still touch the engine's blocks: not DONE, not
// CANCELLED, not the end of the socket.
func TestNoFenceBeforeTheMoverIsReaped(t *testing.T) {
	r := newRig(t, withMover(hangUp))
	_, workers, _ := r.joinEngine(register("engine"))
	w := workers[0]
	if got := w.save(1, chain(1, 8), 0); !all(got, blockOK) {
		t.Fatalf("save %v", got)
	}
	pid := r.moverPid()
	devicetest.Freeze(t, pid)
	w.send(&ipc.Load{Job: 77, Epoch: 1, Event: ipc.None, Sections: []ipc.Section{section(chain(1, 8), 0)}})
	r.waitFor("the load is copied", func(st admin.Status) bool { return st.Movers[0].Copies > 0 })
	w.send(&ipc.Cancel{Job: 77})
	select {
	case m, open := <-w.messages:
		if !errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			t.Fatalf("%T %+v (open: %v) while the mover is there", m, m, open)
		}
	case <-time.After(patience):
		t.Fatal("nothing came")
	}
	r.waitFor("the worker is gone", func(st admin.Status) bool { return st.Regions == 0 })
	if n := r.guests.Status().Movers[0].Lost["ping"]; n != 1 {
		t.Errorf("%d losses by ping, want 1", n)
	}
}

// Regions on a GPU, where there is none: refused with the reason, and nothing is left.
func TestGPUMemoryWithoutCUDA(t *testing.T) {
	r := newRig(t, withMover(hangUp))
	c := r.dial()
	handle := func(gpu byte) []byte {
		h := make([]byte, 80)
		h[64] = gpu
		return h
	}
	for name, test := range map[string]struct {
		change func(*ipc.Regions)
		want   string
	}{
		"no CUDA": {func(*ipc.Regions) {}, "no CUDA"},
		"two GPUs": {func(g *ipc.Regions) {
			g.List = append(g.List, ipc.RegionDesc{ID: 9, Kind: 3, Size: 4096, Handle: handle(2)})
		}, "a worker's are all on one GPU"},
		"no UUID":     {func(g *ipc.Regions) { g.List[1].Handle = handle(0) }, "handle: no UUID"},
		"an id twice": {func(g *ipc.Regions) { g.List = append(g.List, g.List[1]) }, "named twice"},
	} {
		m := register("gpu")
		regions, fds, segments := c.prepare(m)
		var sync []int
		for i := range regions.List {
			if regions.List[i].ID == m.Sync.Region {
				sync = fds[i : i+1]
				regions.List[0], regions.List[i] = regions.List[i], regions.List[0]
			}
		}
		regions.List[1] = ipc.RegionDesc{ID: regions.List[1].ID, Kind: ipc.RegionCUDA, Size: regions.List[1].Size,
			Addr: 512, Handle: handle(1)}
		test.change(regions)
		m.Regions = uint32(len(regions.List))
		m.Sync.Events = 0
		c.send(m)
		c.send(regions, sync...)
		c.send(segments)
		if answer := next[*ipc.Registered](c); answer.Status != ipc.RegRefused ||
			!strings.Contains(answer.Text, test.want) {
			t.Errorf("%s: %+v, want a refusal with %q", name, answer, test.want)
		}
		check(t, c.engine.Close())
		c.engine = nil
	}
}

// A mover that worked and cannot be restarted makes the agent not ready, and refuses registrations
// with the reason.
func TestReadyNamesAFailingMover(t *testing.T) {
	o := hangUp
	o.Limits.Steady, o.Limits.Again, o.Limits.AtMost = time.Hour, time.Hour, time.Hour
	r := newRig(t, withMover(o))
	for range 2 {
		c := r.dial()
		c.registered(c.registerWorker(register("engine")))
		check(t, r.agent.Ready())
		check(t, unix.Kill(r.moverPid(), unix.SIGKILL))
		next[*ipc.Error](c)
		r.waitFor("the engine is gone", func(st admin.Status) bool { return st.Engines == 0 })
	}
	if err := r.agent.Ready(); !contains(err, "host: mover host was lost (crash)") {
		t.Errorf("ready: %v, want the mover's loss", err)
	}
	answer := r.dial().registerWorker(register("engine"))
	if answer.Status != ipc.RegRefused || !strings.Contains(answer.Text, "not started again for") {
		t.Errorf("%+v, want a refusal that says when", answer)
	}
}

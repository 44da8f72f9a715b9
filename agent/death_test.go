package agent

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// Victims are engines in processes of their own: the test binary again, told by the environment how
// far to go.
const (
	victimPhase = "KVAGENT_TEST_VICTIM_PHASE"
	victimDir   = "KVAGENT_TEST_VICTIM_DIR"
	victimName  = "victim"
)

// panicTB lets a victim use the test's client: any failure ends the process.
type panicTB struct{ testing.TB }

func (panicTB) Helper()                      {}
func (panicTB) Cleanup(func())               {}
func (panicTB) Fatal(args ...any)            { panic(fmt.Sprint(args...)) }
func (panicTB) Fatalf(f string, args ...any) { panic(fmt.Sprintf(f, args...)) }
func (panicTB) Errorf(f string, args ...any) { panic(fmt.Sprintf(f, args...)) }

// victim goes as far as the phase says, tells so on its standard output, and waits for its end.
func victim(phase, dir string) {
	r := &rig{t: panicTB{}, dir: dir}
	child := 0
	switch phase {
	case "handshake":
		r.dial()
	case "half registered":
		c := r.dial()
		m := register(victimName)
		regions, fds, _ := c.prepare(m)
		c.send(m)
		c.send(regions, fds...)
		c.send(&ipc.Ping{Req: 1})
		next[*ipc.Pong](c)
	case "importing":
		r.dial().sendRegistration(register(victimName))
	case "registered", "forked":
		m := register(victimName)
		m.LookupName = victimName
		scheduler, workers, _ := r.joinEngine(m)
		reserve(r, scheduler)
		if phase == "forked" {
			child = leaveChild(workers[0])
		}
	case "at its budget":
		savesAtItsBudget(r)
	case "saving", "loading":
		m := register(victimName)
		scheduler, workers, _ := r.joinEngine(m)
		reserve(r, scheduler)
		w := workers[0]
		if phase == "saving" { // waits for a step that does not come
			w.send(&ipc.Save{Job: 1, Epoch: 1, Step: 99, Event: ipc.None, Revoke: ipc.None,
				Sections: []ipc.Section{section(chain(2, 40), 0)}})
		} else {
			w.send(&ipc.Load{Job: 1, Epoch: 1, Step: 99, Event: ipc.None,
				Sections: []ipc.Section{section(chain(1, 4), 0)}})
		}
		w.send(&ipc.Ping{Req: 1})
		next[*ipc.Pong](w)
	}
	fmt.Println("there", child)
	select {}
}

// reserve takes a lease on what the test has stored.
func reserve(r *rig, scheduler *client) {
	look := mockengine.DialLookup(r.path(socketdir.Lookup))
	defer func() { check(r.t, look.Close()) }()
	reply := ask(r.t, look, ipc.LookupRequest{
		Space: register(victimName).Space(), Session: scheduler.welcome.Session, Want: ipc.WantReserve, Tokens: 1000,
		HashLen: 32, Hashes: chain(1, 4),
	})
	if reply.Lease == 0 {
		panic(fmt.Sprintf("no lease: %+v", reply))
	}
}

// leaveChild starts a process that holds the worker's session socket open.
func leaveChild(*client) int {
	cmd := exec.Command("sleep", "1000")
	for fd := 3; fd < 64; fd++ { // all sockets: which one is the session's makes no difference
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFSOCK {
			cmd.ExtraFiles = append(cmd.ExtraFiles, os.NewFile(uintptr(fd), "socket"))
		}
	}
	if err := cmd.Start(); err != nil {
		panic(err)
	}
	return cmd.Process.Pid
}

// startVictim starts one and waits until it is there.
func (r *rig) startVictim(phase string) (cmd *exec.Cmd, child int) {
	r.t.Helper()
	self, err := os.Executable()
	check(r.t, err)
	cmd = exec.Command(self)
	cmd.Env = append(os.Environ(), victimPhase+"="+phase, victimDir+"="+r.dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	check(r.t, err)
	check(r.t, cmd.Start())
	r.t.Cleanup(func() {
		_ = cmd.Process.Kill() // dead already in most tests
		_ = cmd.Wait()         // its error is that it was killed
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		r.t.Fatalf("the victim did not come to its phase %q: %v", phase, err)
	}
	child, err = strconv.Atoi(strings.Fields(line)[1])
	check(r.t, err)
	return cmd, child
}

// stored gives the victims' space some blocks, saved by an engine that stays.
func (r *rig) stored() *client {
	r.t.Helper()
	_, w, _ := r.joinEngine(register("stays"))
	if got := w[0].save(1, chain(1, 4), 0); !all(got, blockOK) {
		r.t.Fatalf("save: %v", got)
	}
	return w[0]
}

// onlyStays waits until nothing is left of the victim, and checks how long that took.
func (r *rig) onlyStays(regions int) {
	r.t.Helper()
	r.waitFor("the dead engine is gone", func(s admin.Status) bool {
		return s.Engines == 1 && s.Regions == regions && s.Leases == 0 && s.Sessions == 2 && s.Jobs == 0
	})
	st := r.guests.Status()
	r.t.Logf("clean-up: %.2f ms", st.CleanupMaxMS)
	if st.CleanupMaxMS >= 2000 {
		r.t.Errorf("clean-up took %.1f ms, want less than 2000", st.CleanupMaxMS)
	}
	if st.Pool.Pinned != 0 {
		r.t.Errorf("%d bytes stay pinned", st.Pool.Pinned)
	}
}

// A dead engine costs nothing, whatever it was doing.
func TestEngineKilled(t *testing.T) {
	for _, phase := range []string{"handshake", "half registered", "registered", "saving", "loading", "forked"} {
		t.Run(phase, func(t *testing.T) {
			r := newRig(t)
			r.stored()
			cmd, child := r.startVictim(phase)
			if child != 0 {
				defer func() { check(t, unix.Kill(child, unix.SIGKILL)) }()
			}
			before := r.guests.Status()
			check(t, cmd.Process.Signal(unix.SIGKILL))
			r.onlyStays(2)
			if phase == "saving" && before.Jobs != 1 {
				t.Errorf("%d jobs ran when it was killed, want 1", before.Jobs)
			}
			_, again, _ := r.joinEngine(register(victimName)) // its place is free
			if got := again[0].load(1, 0, chain(1, 4), 0); !all(got, blockOK) {
				t.Errorf("load by the successor: %v", got)
			}
		})
	}
}

// A successor that comes before its predecessor's death was seen waits for the end of it.
func TestSuccessorWaitsForPredecessor(t *testing.T) {
	r := newRig(t, withConfig(func(c *Config) { c.Limits.Predecessor = patience }))
	r.stored()
	cmd, _ := r.startVictim("saving")
	answered := make(chan *ipc.Registered)
	c := r.dial()
	regions, fds, segments := c.prepare(register(victimName))
	m := register(victimName)
	words, sync := c.engine.SyncDesc()
	m.Sync = &ipc.SyncDesc{Region: uint32(words.ID), StepOff: sync.StepOff, EventsOff: sync.EventsOff}
	m.Regions, m.Segments = 2, 1
	c.send(m)
	c.send(regions, fds...)
	c.send(segments)
	go func() { answered <- next[*ipc.Registered](c) }()
	pooltest.Until(t, "the successor waits", func() bool {
		select {
		case got := <-answered:
			t.Fatalf("answered while the predecessor lives: %+v", got)
		default:
		}
		return pooltest.Parked("select", "agent.(*registry).admit")
	})
	check(t, cmd.Process.Signal(unix.SIGKILL))
	if got := <-answered; got.Status != ipc.RegDone {
		t.Fatalf("refused: %s", got.Text)
	}
}

// A stopped engine is not dead: it costs other engines nothing, continues when it is woken, and is
// cleaned up when it is killed while stopped.
func TestEngineStopped(t *testing.T) {
	r := newRig(t)
	stays := r.stored()
	cmd, _ := r.startVictim("saving")
	check(t, cmd.Process.Signal(unix.SIGSTOP))
	for range 50 {
		if got := stays.load(1, 0, chain(1, 4), 8); !all(got, blockOK) {
			t.Fatalf("load beside a stopped engine: %v", got)
		}
	}
	if st := r.guests.Status(); st.Engines != 2 || st.Leases != 1 {
		t.Errorf("%d engines, %d leases: a stopped engine keeps its own", st.Engines, st.Leases)
	}
	check(t, cmd.Process.Signal(unix.SIGCONT))
	check(t, cmd.Process.Signal(unix.SIGSTOP))
	check(t, cmd.Process.Signal(unix.SIGKILL))
	r.onlyStays(2)
}

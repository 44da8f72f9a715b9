package main

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/engine"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// noKill makes a command's kills of movers do nothing: a mover that is stopped is then one in a
// call that does not return, which no signal ends.
const noKill = "KVAGENT_TEST_NO_KILL"

// statusOf asks until the agent answers.
func statusOf(t *testing.T, dir string) (st admin.Status) {
	t.Helper()
	pooltest.Until(t, "the agent answers", func() bool {
		body, err := adminclient.New(dir).Get(t.Context(), "/status")
		return err == nil && json.Unmarshal(body, &st) == nil
	})
	return st
}

// testWorker is an engine's worker with one region, of this process.
type testWorker struct {
	conn   *ipc.Conn
	engine *engine.Host
	ended  chan error // the error that ended the session
	answer chan *ipc.Registered
	space  [16]byte
}

func joinWorker(t *testing.T, dir string) *testWorker {
	t.Helper()
	conn, _, err := mockengine.DialSession(t.Context(), filepath.Join(dir, socketdir.Session), "test")
	if err != nil {
		t.Fatal(err)
	}
	w := &testWorker{conn: conn, ended: make(chan error, 1), answer: make(chan *ipc.Registered, 1)}
	if w.engine, err = engine.NewHost(1, 1); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = conn.Close(), w.engine.Close() })
	kv, err := w.engine.Alloc(0, 8*4096)
	if err != nil {
		t.Fatal(err)
	}
	words, sync := w.engine.SyncDesc()
	region := kv.Region()
	for _, m := range []struct {
		message any
		fds     []int
	}{
		{&ipc.Register{
			Req: 1, Instance: "engine", Role: ipc.RoleWorker, World: 1, Held: []uint32{0}, Shards: 1, HashTokens: 16,
			Regions:  2,
			Segments: 1,
			Identity: []ipc.Pair{{Key: "dtype", Value: "bf16"}, {Key: "model", Value: "test"},
				{Key: "tenant", Value: ""}},
			Groups: []ipc.GroupDesc{{BlockTokens: 16, NumBlocks: 8}},
			Sync: &ipc.SyncDesc{
				Region: uint32(sync.Region), StepOff: sync.StepOff, EventsOff: sync.EventsOff, Events: sync.Events,
				RevokeOff: sync.RevokeOff, Revokes: sync.Revokes,
			},
		}, nil},
		{&ipc.Regions{Req: 1, List: []ipc.RegionDesc{
			{ID: uint32(region.ID), Kind: ipc.RegionFD, Size: region.Size}, {ID: uint32(words.ID), Kind: ipc.RegionFD,
				Size: words.Size},
		}}, []int{region.FD, words.FD}},
		{&ipc.Segments{Req: 1, List: []ipc.SegmentDesc{{Region: uint32(region.ID), Stride: 4096, Bytes: 4096}}}, nil},
	} {
		if err := conn.Send(m.message, m.fds...); err != nil {
			t.Fatal(err)
		}
	}
	go w.pump()
	select {
	case a := <-w.answer:
		if a.Status != ipc.RegDone {
			t.Fatalf("registration: %s", a.Text)
		}
		w.space = a.Space
	case err := <-w.ended:
		t.Fatalf("the session ended: %v", err)
	case <-time.After(pooltest.WaitLimit):
		t.Fatal("no answer to a registration")
	}
	return w
}

func (w *testWorker) pump() {
	for {
		m, _, err := w.conn.Recv()
		if err != nil {
			w.ended <- err
			return
		}
		if a, ok := m.(*ipc.Registered); ok {
			w.answer <- a
		}
	}
}

// agentWithStoppedMover is an agent with a block pool in a file and an engine, whose mover is
// stopped.
func agentWithStoppedMover(t *testing.T, env ...string) (path, dir string, cmd *exec.Cmd, log *processLog,
	mover int, w *testWorker) {
	t.Helper()
	path = poolFile(t)
	for _, e := range env {
		name, value, _ := strings.Cut(e, "=")
		t.Setenv(name, value)
	}
	cmd, dir, log = startServe(t, "--dram-path", path, "--device", "host-mover", "--drain-timeout", "1s")
	if out, err := kvagentCommand(t, "mock", "--socket-dir", dir, "--requests", "20", "--block-bytes",
		"4096").CombinedOutput(); err != nil {
		t.Fatalf("mock: %v\n%s", err, out)
	}
	w = joinWorker(t, dir)
	st := statusOf(t, dir)
	if len(st.Movers) != 1 || st.Movers[0].PID == 0 || st.BlocksStored == 0 {
		t.Fatalf("movers %+v, %d blocks stored", st.Movers, st.BlocksStored)
	}
	mover = st.Movers[0].PID
	t.Cleanup(func() { _ = syscall.Kill(mover, syscall.SIGKILL) }) // it has ended, unless the test failed
	devicetest.Freeze(t, mover)
	return path, dir, cmd, log, mover, w
}

// follow starts another agent in the place of one, and waits until it serves.
func follow(t *testing.T, path, dir string) (next *exec.Cmd, log *processLog, st admin.Status) {
	t.Helper()
	log = &processLog{}
	t.Setenv(testLimits, "takeover=3s")
	next = kvagentCommand(t, "serve", "--socket-dir", dir, "--pool", "16MiB", "--dram-path", path, "--device",
		"host-mover")
	next.Stderr = log
	if err := next.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = next.Process.Kill() }) // it has ended, unless the test failed
	pooltest.Until(t, "the next agent serves", func() bool {
		st = statusOf(t, dir)
		return st.PID == next.Process.Pid && st.Ready
	})
	return next, log, st
}

// A mover that is stopped when its agent is killed ends with it: the next agent has the blocks, and
// the engine's session ends.
func TestStoppedMoverOfADeadAgentEnds(t *testing.T) {
	path, dir, cmd, _, _, w := agentWithStoppedMover(t)
	_ = cmd.Process.Kill()
	_, _ = cmd.Process.Wait() // it was killed; cmd.Wait would wait for its mover, which has its standard error
	next, _, st := follow(t, path, dir)
	if st.Abandoned != "" || st.BlocksStored == 0 {
		t.Errorf("abandoned %q, %d blocks stored; want the blocks", st.Abandoned, st.BlocksStored)
	}
	select {
	case <-w.ended:
	case <-time.After(pooltest.WaitLimit):
		t.Error("the engine's session does not end, though its mover is gone")
	}
	endServe(t, next)
}

// A mover that does not end when its agent is killed does not keep the node from being served: the
// next agent starts without the pool's file, and says so. The engines' sessions that it has do not
// end, because nothing proves that it will not touch their memory.
func TestMoverOfADeadAgentKeepsItsFile(t *testing.T) {
	path, dir, cmd, _, mover, w := agentWithStoppedMover(t, noKill+"=1")
	_ = cmd.Process.Kill()
	_, _ = cmd.Process.Wait() // it was killed; cmd.Wait would wait for its mover, which has its standard error
	next, log, st := follow(t, path, dir)
	if st.Abandoned == "" || st.BlocksStored != 0 || !strings.Contains(log.String(), "is abandoned") {
		t.Errorf("abandoned %q, %d blocks stored; want the reason, and none: %s", st.Abandoned, st.BlocksStored, log)
	}
	body, err := adminclient.New(dir).Get(t.Context(), "/metrics")
	if err != nil || !strings.Contains(string(body), "kvagent_pool_file_abandoned 1") {
		t.Errorf("metrics: %v", err)
	}
	joinWorker(t, dir) // is served
	select {
	case err := <-w.ended:
		t.Errorf("the session of the memory that the mover has ended: %v", err)
	default:
	}
	if err := syscall.Kill(mover, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case <-w.ended:
	case <-time.After(pooltest.WaitLimit):
		t.Error("the session does not end though the mover has")
	}
	endServe(t, next)
}

// SIGTERM ends an agent within --drain-timeout and endWithin, though a mover can be neither ended
// nor reaped, and says what it leaves. The engine's session does not end with it.
func TestTermWithAnUnendableMover(t *testing.T) {
	path, dir, cmd, log, mover, w := agentWithStoppedMover(t, noKill+"=1")
	_ = cmd.Process.Signal(syscall.SIGTERM) // of the children of this test
	state, err := cmd.Process.Wait()
	if err != nil || state.ExitCode() != exitCut {
		t.Errorf("%v, %v, want exit code %d", state, err, exitCut)
	}
	select {
	case err := <-w.ended:
		t.Errorf("the session ended: %v", err)
	default:
	}
	next, _, st := follow(t, path, dir)
	if st.Abandoned == "" {
		t.Error("the next agent has the pool's file")
	}
	endServe(t, next)
	if err := syscall.Kill(mover, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-w.ended
	_ = cmd.Wait() // its error is that it was waited for
	if !strings.Contains(log.String(), "movers that do not end stay") {
		t.Errorf("the log does not say what is left: %s", log)
	}
}

// SIGTERM with a mover that is only stopped: it is killed and reaped, and the agent ends in order.
func TestTermWithAStoppedMover(t *testing.T) {
	_, _, cmd, _, _, _ := agentWithStoppedMover(t)
	endServe(t, cmd)
}

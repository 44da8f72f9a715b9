package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// noKill makes a command's kills of movers do nothing: a mover that is stopped is then one in a
// call that does not return, which no signal ends.
const noKill = "KVAGENT_TEST_NO_KILL"

// statusOf asks until the agent answers.
func statusOf(t *testing.T, dir string) (st agent.Status) {
	t.Helper()
	for limit := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		body, err := newAdmin(dir).get(t.Context(), "/status")
		if err == nil && json.Unmarshal(body, &st) == nil {
			return st
		}
		if time.Now().After(limit) {
			t.Fatalf("no status: %v", err)
		}
	}
}

// testWorker is an engine's worker with one region, of this process.
type testWorker struct {
	conn   *ipc.Conn
	engine *cudaipc.HostEngine
	ended  chan error // the error that ended the session
	answer chan *ipc.Registered
}

func joinWorker(t *testing.T, dir string) *testWorker {
	t.Helper()
	conn, _, err := ipc.DialSession(t.Context(), filepath.Join(dir, ipc.SessionSocket), "test", ipc.MinVersion,
		ipc.Version)
	if err != nil {
		t.Fatal(err)
	}
	w := &testWorker{conn: conn, ended: make(chan error, 1), answer: make(chan *ipc.Registered, 1)}
	if w.engine, err = cudaipc.NewHostEngine(1, 1); err != nil {
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
			Req: 1, Instance: "engine", Role: ipc.RoleWorker, World: 1, Shards: 1, HashTokens: 16, Regions: 2, Segments: 1,
			Identity: []ipc.Pair{{Key: "dtype", Value: "bf16"}, {Key: "model", Value: "test"}, {Key: "tenant", Value: ""}},
			Groups:   []ipc.GroupDesc{{BlockTokens: 16, NumBlocks: 8}},
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
	case err := <-w.ended:
		t.Fatalf("the session ended: %v", err)
	case <-time.After(20 * time.Second):
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
	if err := syscall.Kill(mover, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	pooltest.Until(t, "the mover stands still", func() bool {
		state, _, ok := processState(mover)
		return ok && state == "T"
	})
	return path, dir, cmd, log, mover, w
}

// follow starts another agent in the place of one, and waits until it serves. It would wait an hour
// for who lets go by himself.
func follow(t *testing.T, path, dir string) (*exec.Cmd, *processLog, agent.Status) {
	t.Helper()
	log := &processLog{}
	next := kvagentCommand(t, "serve", "--socket-dir", dir, "--pool", "16MiB", "--dram-path", path, "--device",
		"host-mover", "--takeover-wait", "1h")
	next.Stderr = log
	if err := next.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = next.Process.Kill() }) // it has ended, unless the test failed
	for {
		st := statusOf(t, dir)
		if st.PID == next.Process.Pid && st.Ready {
			return next, log, st
		}
		time.Sleep(5 * time.Millisecond) // between two questions to another process
	}
}

// A mover that stands still when its agent is killed keeps the pool's file and the engines'
// sockets. The next agent ends it, and has the blocks.
func TestStoppedMoverIsEnded(t *testing.T) {
	path, dir, cmd, _, mover, w := agentWithStoppedMover(t)
	_ = cmd.Process.Kill()
	_, _ = cmd.Process.Wait() // it was killed; cmd.Wait would wait for its mover, which has its standard error
	next, _, st := follow(t, path, dir)
	if l := st.LeftBehind; l.Ended != 1 || len(l.PIDs) != 0 || l.Cold != "" || st.BlocksStored == 0 {
		t.Errorf("left behind %+v, %d blocks stored; want one ended, and the blocks", l, st.BlocksStored)
	}
	select {
	case err := <-w.ended:
		if !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("the engine's session ended with %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Error("the engine's session does not end, though its mover is gone")
	}
	if !gone(mover) {
		t.Error("the mover is there")
	}
	joinWorker(t, dir)
	endServe(t, next)
}

// A mover that nobody can end does not keep the node from being served: its successor goes on
// without the pool's file, and says so. The engines' sessions that it has do not end, because
// nothing proves that it will not touch their memory.
func TestUnendableMoverIsLeftBehind(t *testing.T) {
	path, dir, cmd, _, mover, w := agentWithStoppedMover(t)
	_ = cmd.Process.Kill()
	_, _ = cmd.Process.Wait() // it was killed; cmd.Wait would wait for its mover, which has its standard error
	t.Setenv(noKill, "1")
	next, log, st := follow(t, path, dir)
	if l := st.LeftBehind; len(l.PIDs) != 1 || l.PIDs[0] != mover || l.Cold == "" || st.BlocksStored != 0 {
		t.Errorf("left behind %+v, %d blocks stored; want process %d, why it is cold, and no block", l, st.BlocksStored,
			mover)
	}
	body, err := newAdmin(dir).get(t.Context(), "/metrics")
	if err != nil || !strings.Contains(string(body), "kvagent_left_behind_processes 1") ||
		!strings.Contains(string(body), "kvagent_pool_file_given_up 1") {
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
	case <-time.After(20 * time.Second):
		t.Error("the session does not end though the mover has")
	}
	for limit := time.Now().Add(20 * time.Second); len(statusOf(t,
		dir).LeftBehind.PIDs) > 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatal("the end of the mover is not seen")
		}
	}
	endServe(t, next)
	for _, say := range []string{"does not end", "given up"} {
		if !strings.Contains(log.String(), say) {
			t.Errorf("the log does not say %q: %s", say, log)
		}
	}
}

// The movers of an agent in another namespace of processes stay written down while their pool's file
// is waited for: if the agent that waits dies, the next one still knows who holds the file.
func TestUnseenMoversStayRecorded(t *testing.T) {
	path, dir, cmd, _, mover, _ := agentWithStoppedMover(t)
	_ = cmd.Process.Kill()
	_, _ = cmd.Process.Wait() // it was killed; cmd.Wait would wait for its mover, which has its standard error
	f, err := readMovers(dir)
	if err != nil {
		t.Fatal(err)
	}
	f.Namespace++
	text, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, ipc.MoversFile), text, 0o600); err != nil {
		t.Fatal(err)
	}
	start := func(wait string) (*exec.Cmd, *processLog) {
		next, log := kvagentCommand(t, "serve", "--socket-dir", dir, "--pool", "16MiB", "--dram-path", path, "--device",
			"host-mover", "--takeover-wait", wait), &processLog{}
		next.Stderr = log
		if err := next.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = next.Process.Kill() }) // it has ended, unless the test failed
		return next, log
	}
	next, log := start("1h")
	pooltest.Until(t, "the file is waited for", func() bool {
		return strings.Contains(log.String(), "waiting for another agent")
	})
	_ = next.Process.Kill() // of the children of this test
	_ = next.Wait()         // it was killed
	if now, err := os.ReadFile(filepath.Join(dir, ipc.MoversFile)); err != nil || string(now) != string(text) {
		t.Errorf("recorded while it waits: %q, %v, want %q", now, err, text)
	}
	next, log = start("100ms")
	waitStatus(t, dir, "pid", func(n float64) bool { return int(n) == next.Process.Pid })
	if st := statusOf(t, dir); st.LeftBehind.Cold == "" {
		t.Errorf("the pool is not cold: %+v: %s", st.LeftBehind, log)
	}
	if f, err := readMovers(dir); err != nil || len(f.Movers) != 1 || f.Movers[0].Agent.PID != next.Process.Pid {
		t.Errorf("recorded when the file was given up: %+v, %v", f, err)
	}
	if gone(mover) {
		t.Error("a process of another namespace was ended")
	}
	endServe(t, next)
}

// SIGTERM ends an agent within --drain-timeout and endWithin, though a mover can be neither ended
// nor reaped, and says what it leaves. The engine's session does not end with it.
func TestTermWithAnUnendableMover(t *testing.T) {
	_, _, cmd, log, mover, w := agentWithStoppedMover(t, noKill+"=1")
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
	if err := syscall.Kill(mover, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-w.ended
	_ = cmd.Wait() // its error is that it was waited for
	if !strings.Contains(log.String(), "left behind") {
		t.Errorf("the log does not say what is left behind: %s", log)
	}
}

// SIGTERM with a mover that is only stopped: it is killed and reaped, and the agent ends in order.
func TestTermWithAStoppedMover(t *testing.T) {
	_, dir, cmd, _, _, _ := agentWithStoppedMover(t)
	endServe(t, cmd)
	if _, err := os.Stat(filepath.Join(dir, ipc.MoversFile)); err == nil {
		t.Error("the list of movers is left behind")
	}
}

// An agent that ends in order reaps its movers when its successor may have the directory already:
// the list of movers is not touched any more, and the successor finds none of its processes.
func TestEndedAgentLeavesItsList(t *testing.T) {
	path := poolFile(t)
	cmd, dir, _ := startServe(t, "--dram-path", path, "--device", "host-mover")
	st := statusOf(t, dir)
	endServe(t, cmd)
	if f, err := readMovers(dir); err != nil || len(f.Movers) != 1 || len(st.Movers) != 1 ||
		f.Movers[0].PID != st.Movers[0].PID {
		t.Errorf("the list of movers was written when the directory was free: %+v, %v", f, err)
	}
	next, _, st := follow(t, path, dir)
	if l := st.LeftBehind; l.Ended != 0 || len(l.PIDs) != 0 || l.Cold != "" {
		t.Errorf("left behind %+v; want nothing", l)
	}
	endServe(t, next)
}

// An agent that has stopped its record leaves alone what its successor writes.
func TestStoppedRecordIsTheSuccessors(t *testing.T) {
	dir := t.TempDir()
	first, err := newMoversRecord(dir, nil, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	first.note(77, true)
	first.stop()
	second, err := newMoversRecord(dir, nil, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	second.note(78, true)
	first.note(77, false)
	if f, err := readMovers(dir); err != nil || len(f.Movers) != 1 || f.Movers[0].PID != 78 {
		t.Errorf("recorded %+v, %v", f, err)
	}
}

// startSleeper starts a process that has what movers have, of an agent that is gone.
func startSleeper(t *testing.T) (*exec.Cmd, recordedMover) {
	t.Helper()
	const mark = "0123"
	cmd := exec.Command("sleep", "100")
	cmd.Env = append(os.Environ(), markEnv+"="+mark)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() }) // one may have ended
	exe, err := exeOf(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return cmd, recordedMover{process{cmd.Process.Pid, began(cmd.Process.Pid)}, exe, mark, process{1, 1}}
}

// Nothing but the very process that was written down is killed.
func TestOnlyTheRecordedProcessIsEnded(t *testing.T) {
	l := &leftBehind{log: zap.NewNop()}
	_, m := startSleeper(t)
	for name, change := range map[string]func(*recordedMover){
		"began":  func(m *recordedMover) { m.Began++ },
		"exe":    func(m *recordedMover) { m.Exe.Ino++ },
		"no exe": func(m *recordedMover) { m.Exe = fileID{} },
		"mark":   func(m *recordedMover) { m.Mark = "0124" },
		"self":   func(m *recordedMover) { m.PID, m.Began = os.Getpid(), began(os.Getpid()) },
		"init":   func(m *recordedMover) { m.PID, m.Began = 1, began(1) },
	} {
		other := m
		change(&other)
		if fd, err := l.strike(other); err == nil {
			t.Errorf("%s: another process was killed", name)
			_ = unix.Close(fd)
		}
	}
	fd, err := l.strike(m)
	if err != nil || !ended(fd, 20*time.Second) {
		t.Errorf("the recorded process was not ended: %v", err)
	}
	_ = unix.Close(fd)
	if _, err := l.strike(m); !errors.Is(err, unix.ESRCH) && !ended(fd, 0) {
		t.Errorf("a process that has ended: %v", err)
	}
}

// A process that may be a mover, and could not be killed, holds the pool's file for as long as it is
// there: the file is waited for, as it may end by itself, and then given up.
func TestMoverThatIsLeftAlone(t *testing.T) {
	kill := func(pidfd int) error { return unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0) }
	for name, c := range map[string]struct {
		change func(*recordedMover)
		kill   func(int) error
		held   bool
	}{
		"no exe":      {func(m *recordedMover) { m.Exe = fileID{} }, kill, true},
		"another exe": {func(m *recordedMover) { m.Exe.Ino++ }, kill, true},
		"no mark":     {func(m *recordedMover) { m.Mark = "0124" }, kill, true},
		"no begin":    {func(m *recordedMover) { m.Began = 0 }, kill, true},
		"no right":    {func(*recordedMover) {}, func(int) error { return unix.EPERM }, true},
		"killed":      {func(*recordedMover) {}, kill, false},
		"replaced":    {func(m *recordedMover) { m.Began++ }, kill, false},
		"init":        {func(m *recordedMover) { m.PID, m.Began = 1, began(1) }, kill, false},
	} {
		t.Run(name, func(t *testing.T) {
			cmd, m := startSleeper(t)
			c.change(&m)
			dir := t.TempDir()
			text, err := json.Marshal(moversFile{machineID(), namespaceID(), []recordedMover{m}})
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, ipc.MoversFile), text, 0o600); err != nil {
				t.Fatal(err)
			}
			l := &leftBehind{log: zap.NewNop(), kill: c.kill}
			l.end(t.Context(), dir)
			by := &dram.HeldError{Process: m.Agent.PID, Began: m.Agent.Began}
			held, patient := l.holds(by)
			if held != c.held || held && !patient || len(l.left()) > 0 != c.held {
				t.Errorf("held %v, patient %v, left %+v, want held %v and waited for", held, patient, l.left(), c.held)
			}
			_ = cmd.Process.Kill() // it may have ended
			_ = cmd.Wait()         // it was killed
			if held, _ := l.holds(by); held {
				t.Error("a process that has ended holds the file")
			}
		})
	}
	// Without a descriptor of it, where the kernel or a filter refuses one, its number says the same.
	cmd, m := startSleeper(t)
	left := leftMover{recordedMover: m, pidfd: -1}
	if left.over() {
		t.Error("a process that runs is over")
	}
	other := left
	if other.Began++; !other.over() {
		t.Error("a process whose number another one has is there")
	}
	_ = cmd.Process.Kill() // of the children of this test
	_ = cmd.Wait()         // it was killed
	if !left.over() {
		t.Error("a process that has ended is there")
	}
}

// A file that is given up loses its name and nothing else: who has it open may still use it.
func TestGivenUpFileKeepsItsMemory(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pool")
	if err := os.WriteFile(path, []byte("blocks"), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	l := &leftBehind{log: zap.NewNop()}
	if err := l.giveUp(path, errors.New("held")); err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(file)
	if err != nil || string(text) != "blocks" || l.status().Cold != "held" {
		t.Errorf("%q, %v, cold %q", text, err, l.status().Cold)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the name is there: %v", err)
	}
}

// A file of movers that others could have written, or that is none, ends nobody.
func TestMoversFileOfOthers(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, ipc.MoversFile)
	if f, err := readMovers(dir); err != nil || len(f.Movers) != 0 {
		t.Errorf("no file: %+v, %v", f, err)
	}
	for name, make := range map[string]func() error{
		"writable by others": func() error {
			return errors.Join(os.WriteFile(path, []byte("{}"), 0o600), os.Chmod(path,
				0o666))
		},
		"a link":  func() error { return os.Symlink("/etc/hostname", path) },
		"a pipe":  func() error { return unix.Mkfifo(path, 0o600) },
		"no JSON": func() error { return os.WriteFile(path, []byte("x"), 0o600) },
		"a socket": func() error {
			l, err := net.Listen("unix", path)
			if err == nil {
				l.(*net.UnixListener).SetUnlinkOnClose(false)
				err = l.Close()
			}
			return err
		},
	} {
		_ = os.Remove(path) // there may be none
		if err := make(); err != nil {
			t.Fatal(err)
		}
		if f, err := readMovers(dir); err == nil {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

// The group of the socket directory can write in it. What it plants under the name that the next
// list of movers is written to is neither written to, nor read, nor waited for.
func TestPlantedMoversFile(t *testing.T) {
	for name, plant := range map[string]func(next, other string) error{
		"nothing":      func(string, string) error { return nil },
		"a link":       func(next, other string) error { return os.Symlink(other, next) },
		"another name": func(next, other string) error { return os.Link(other, next) },
		"a pipe":       func(next, _ string) error { return unix.Mkfifo(next, 0o666) },
		"a file of others": func(next, _ string) error {
			return errors.Join(os.WriteFile(next, nil, 0o600), os.Chmod(next, 0o666))
		},
		"a directory": func(next, _ string) error { return os.Mkdir(next, 0o777) },
	} {
		t.Run(name, func(t *testing.T) {
			dir, other := t.TempDir(), filepath.Join(t.TempDir(), "other")
			next := filepath.Join(dir, ipc.MoversFile+".lock")
			if err := errors.Join(os.WriteFile(other, []byte("kept"), 0o600), plant(next, other)); err != nil {
				t.Fatal(err)
			}
			r, err := newMoversRecord(dir, nil, zap.NewNop())
			if err != nil {
				t.Fatal(err)
			}
			noted := make(chan struct{})
			go func() { r.note(77, true); close(noted) }()
			select {
			case <-noted:
			case <-time.After(20 * time.Second):
				fd, err := unix.Open(next, unix.O_RDONLY|unix.O_NONBLOCK, 0) // lets the writer go on
				if err == nil {
					_ = unix.Close(fd)
				}
				t.Fatal("the record waits for what was planted")
			}
			if text, err := os.ReadFile(other); err != nil || string(text) != "kept" {
				t.Errorf("another file was written to: %q, %v", text, err)
			}
			if f, err := readMovers(dir); err != nil || len(f.Movers) != 1 || f.Movers[0].PID != 77 {
				t.Errorf("recorded %+v, %v", f, err)
			}
		})
	}
}

// What holds the pool's file is what was left behind only if its signer is an agent whose movers
// are, whatever that agent's host was called: with hostPID the next pod sees the same processes.
func TestWhoHoldsThePool(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	old := process{77, 5}
	by := dram.HeldError{Process: old.PID, Began: old.Began, Host: host}
	runs, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(runs)
	stuck := func(slow bool) *leftBehind {
		l := &leftBehind{agents: []process{old}}
		l.mu.running = []leftMover{{recordedMover: recordedMover{Agent: old}, pidfd: runs, slow: slow}}
		return l
	}
	for name, c := range map[string]struct {
		left          *leftBehind
		by            dram.HeldError
		held, patient bool
	}{
		"stuck":           {stuck(false), by, true, false},
		"slow":            {stuck(true), by, true, true},
		"ended":           {&leftBehind{agents: []process{old}}, by, false, true},
		"unseen":          {&leftBehind{agents: []process{old}, unseen: true}, by, true, true},
		"another process": {stuck(false), dram.HeldError{Process: 78, Began: 5, Host: host}, false, false},
		"another life":    {stuck(false), dram.HeldError{Process: 77, Began: 6, Host: host}, false, false},
		"another pod":     {stuck(false), dram.HeldError{Process: 77, Began: 5, Host: "x" + host}, true, false},
		"not signed":      {stuck(false), dram.HeldError{}, false, false},
	} {
		held, patient := c.left.holds(&c.by)
		if held != c.held || held && patient != c.patient {
			t.Errorf("%s: held %v, patient %v", name, held, patient)
		}
	}
}

// The bound of an agent's end counts from the end of the drain, and a second signal ends the drain.
func TestEndBound(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	now, endNow := context.WithCancel(t.Context())
	over := make(chan struct{})
	said := make(chan bool)
	go func() { said <- outlasts(ctx, now, time.Hour, over) }()
	end()
	endNow()
	close(over)
	if <-said {
		t.Error("an end in time took too long")
	}
}

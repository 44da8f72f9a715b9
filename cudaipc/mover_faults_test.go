package cudaipc_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// patience is how long these tests wait for what must come.
const patience = 30 * time.Second

// Devices in a mover that go wrong: the host device but for the method that the name tells.
const (
	hangsInCopy   = "hangs in Copy"
	hangsInDone   = "hangs in Done"
	hangsInImport = "hangs in Import"
	hangsInClose  = "hangs in Close"
	hangsInPoll   = "hangs in Poll"
	losesItself   = "says ErrLost"
	doesNotOpen   = "does not open"
)

type faulty struct {
	cudaipc.Device
	fault string
}

// openFaulty is OpenMoved and the devices above.
func openFaulty(s cudaipc.MoverSetup) (cudaipc.Device, error) {
	fault := s.Device
	switch fault {
	case hangsInCopy, hangsInDone, hangsInImport, hangsInClose, hangsInPoll, losesItself:
		s.Device = cudaipc.HostDevice
		d, err := cudaipc.OpenMoved(s)
		return &faulty{d, fault}, err
	case doesNotOpen:
		return nil, fmt.Errorf("on purpose: %w", cudaipc.ErrNoCUDA)
	}
	return cudaipc.OpenMoved(s)
}

func (f *faulty) is(fault string) {
	if f.fault == fault {
		select {}
	}
}

func (f *faulty) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	f.is(hangsInCopy)
	return f.Device.Copy(c)
}

func (f *faulty) Done(t cudaipc.Ticket, timeout time.Duration) (cudaipc.Done, bool, error) {
	f.is(hangsInDone)
	if f.fault == losesItself {
		return cudaipc.Done{}, false, fmt.Errorf("on purpose: %w", cudaipc.ErrLost)
	}
	return f.Device.Done(t, timeout)
}

func (f *faulty) Import(im cudaipc.Import) error {
	f.is(hangsInImport)
	return f.Device.Import(im)
}

func (f *faulty) Close(p cudaipc.PeerID) error {
	f.is(hangsInClose)
	return f.Device.Close(p)
}

func (f *faulty) Poll(w []cudaipc.Wait, s []cudaipc.State) error {
	f.is(hangsInPoll)
	return f.Device.Poll(w, s)
}

// moved is a mover under test, with one engine of 8 MiB as peer 1.
type moved struct {
	t      *testing.T
	mover  *cudaipc.Mover
	arena  []byte
	engine devicetest.Engine

	mu   sync.Mutex
	lost map[cudaipc.PeerID][]error
}

const movedSize = 8 << 20

// quick are limits that a test can wait for, and a busy machine can keep.
var quick = cudaipc.MoverLimits{
	Tick: 20 * time.Millisecond, Ping: time.Second, Import: time.Second, Close: time.Second, Poll: time.Second,
	Copy: time.Second, Steady: time.Nanosecond,
}

func newMoved(t *testing.T, change func(*cudaipc.MoverOptions)) *moved {
	t.Helper()
	m := &moved{t: t, lost: map[cudaipc.PeerID][]error{}}
	f := devicetest.MoverFixture(t, devicetest.MinArena, cudaipc.KindFD, false, func(o *cudaipc.MoverOptions) {
		o.Limits = quick
		if change != nil {
			change(o)
		}
	})
	m.mover, m.arena = f.Device.(*cudaipc.Mover), f.Arena
	m.mover.Watch(func(id cudaipc.PeerID, err error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.lost[id] = append(m.lost[id], err)
	})
	m.engine = f.Engine(t, devicetest.Spec{Regions: []int64{movedSize}, Events: 1, Revokes: 1})
	if _, err := m.engine.Do(devicetest.Op{Kind: devicetest.Fill, Region: 1, Len: movedSize, Seed: 3}); err != nil {
		t.Fatal(err)
	}
	return m
}

func (m *moved) imports(id cudaipc.PeerID) cudaipc.Import {
	m.t.Helper()
	im, err := m.engine.Import(id)
	if err != nil {
		m.t.Fatal(err)
	}
	return im
}

func (m *moved) attach(id cudaipc.PeerID) {
	m.t.Helper()
	if err := m.mover.Import(m.imports(id)); err != nil {
		m.t.Fatalf("Import: %v", err)
	}
}

func (m *moved) pid() int {
	m.t.Helper()
	pid := m.mover.Movers()[0].Pid
	if pid == 0 {
		m.t.Fatal("no process")
	}
	return pid
}

func (m *moved) submit(id cudaipc.PeerID, copies int) (tickets []cudaipc.Ticket) {
	m.t.Helper()
	const blocks, n = 32, movedSize / 32
	for range copies {
		c := &cudaipc.Copy{Peer: id, Sum: true}
		for b := range blocks {
			c.Runs = append(c.Runs, cudaipc.Run{Region: 1, RegionOff: uint64(b) * n, ArenaOff: int64(b) * n, Len: n})
			c.Blocks = append(c.Blocks, cudaipc.Block{Runs: 1})
		}
		ticket, err := m.mover.Copy(c)
		if err != nil {
			m.t.Fatalf("Copy: %v", err)
		}
		tickets = append(tickets, ticket)
	}
	return tickets
}

func (m *moved) done(ticket cudaipc.Ticket) cudaipc.Done {
	m.t.Helper()
	d, ok, err := m.mover.Done(ticket, patience)
	if err != nil || !ok {
		m.t.Fatalf("Done = %v, %v after %v", ok, err, patience)
	}
	return d
}

// works says that peer 1 can be imported and copied from, and closes it.
func (m *moved) works() {
	m.t.Helper()
	m.attach(1)
	if d := m.done(m.submit(1, 1)[0]); d.Err != nil {
		m.t.Fatalf("copy: %v", d.Err)
	}
	if err := m.mover.Close(1); err != nil {
		m.t.Fatalf("Close: %v", err)
	}
}

// gone says that a process is no more, not even to be reaped.
func gone(pid int) bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) }

// expectLost holds a peer that is lost to cudaipc.Watcher, and closes it.
func (m *moved) expectLost(id cudaipc.PeerID, reason cudaipc.LossReason) {
	m.t.Helper()
	_, err := m.mover.Copy(&cudaipc.Copy{Peer: id})
	polled := m.mover.Poll([]cudaipc.Wait{{Peer: id, Event: 0, Revoke: 0}}, make([]cudaipc.State, 1))
	for what, err := range map[string]error{"Copy": err, "Poll": polled} {
		var lost *cudaipc.LostError
		if !errors.Is(err, cudaipc.ErrPeer) || !errors.As(err, &lost) || lost.Reason != reason {
			m.t.Errorf("%s of a lost peer: %v, want ErrPeer and the loss (%s)", what, err, reason)
		}
	}
	m.told(id)
	if err := m.mover.Close(id); err != nil {
		m.t.Errorf("Close of a lost peer: %v", err)
	}
	if n := m.mover.Movers()[0].Lost[reason]; n != 1 {
		m.t.Errorf("%d losses by %q, want 1", n, reason)
	}
}

// told waits until the loss of a peer is told, once.
func (m *moved) told(id cudaipc.PeerID) {
	m.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) { // a pause between two looks
		m.mu.Lock()
		n := len(m.lost[id])
		m.mu.Unlock()
		if n == 1 {
			return
		}
		if n > 1 || time.Now().After(end) {
			m.t.Fatalf("the loss of peer %d was told %d times, want once", id, n)
		}
	}
}

// agentEnv is set in a process that plays an agent with a mover, to its device: see TestAgentDies.
const agentEnv = "KVAGENT_MOVER_TEST_AGENT"

// playAgent imports a peer whose proof is descriptor 3 into a mover, tells the mover's process, and waits for its death.
func playAgent() {
	device := os.Getenv(agentEnv)
	if device == "" {
		return
	}
	if err := agentWithMover(device); err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
	select {}
}

func agentWithMover(device string) error {
	arena, err := unix.MemfdCreate("arena", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(arena, 1<<20)
	}
	if err != nil {
		return err
	}
	if err := os.Unsetenv(agentEnv); err != nil {
		return err
	}
	m, err := cudaipc.NewMover(cudaipc.MoverOptions{
		Device: device, ArenaFD: arena, ArenaSize: 1 << 20, Command: devicetest.MoverCommand, Env: devicetest.MoverEnv, Node: -1,
	})
	if err != nil {
		return err
	}
	im := cudaipc.Import{Peer: 1, Proof: 3, Regions: []cudaipc.Region{{ID: 1, Kind: cudaipc.KindFD, Size: 1 << 20}}}
	unix.CloseOnExec(im.Proof)
	if im.Regions[0].FD, err = unix.FcntlInt(uintptr(arena), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return err
	}
	if err := m.Import(im); err != nil {
		return err
	}
	c := cudaipc.Copy{Peer: 1, Runs: []cudaipc.Run{{Region: 1, Len: 4096}}, Blocks: []cudaipc.Block{{Runs: 1}}}
	if _, err := m.Copy(&c); err != nil {
		return err
	}
	fmt.Println(m.Movers()[0].Pid)
	return nil
}

// startAgent starts playAgent and gives its process, its mover's, and the far end of the proof.
func startAgent(t *testing.T, device string) (agent *exec.Cmd, mover int, proof *os.File) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	proof = os.NewFile(uintptr(pair[0]), "proof")
	t.Cleanup(func() { _ = proof.Close() })
	theirs := os.NewFile(uintptr(pair[1]), "proof")
	defer theirs.Close()
	agent = exec.Command("/proc/self/exe")
	agent.Env, agent.Stderr, agent.ExtraFiles = append(os.Environ(), agentEnv+"="+device), os.Stderr, []*os.File{theirs}
	out, err := agent.StdoutPipe()
	if err == nil {
		err = agent.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 32)
	n, _ := out.Read(line)
	if mover, err = strconv.Atoi(string(line[:max(n-1, 0)])); err != nil {
		_ = agent.Process.Kill()
		_ = agent.Wait()
		t.Fatalf("the agent said %q", line[:n])
	}
	return agent, mover, proof
}

// ended waits for the end of a proof.
func ended(t *testing.T, proof int, within time.Duration) bool {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(proof), Events: unix.POLLIN}}
	for end := time.Now().Add(within); ; {
		n, err := unix.Poll(fds, int(time.Until(end).Milliseconds())+1)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			return false
		}
		got, err := unix.Read(proof, make([]byte, 1))
		return got == 0 && (err == nil || errors.Is(err, io.EOF))
	}
}

package mover_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
)

// testTimeout is how long these tests wait for an event.
const testTimeout = 30 * time.Second

// Devices in a mover that go wrong: the host device but for the method that the name tells.
const (
	hangsInCopy   = "hangs in Copy"
	hangsInDone   = "hangs in Done"
	hangsForTwo   = "hangs in Done of peer 2"
	hangsInImport = "hangs in Import"
	hangsInOpen   = "hangs in its opening"
	slowInImport  = "imports slowly"
	hangsInClose  = "hangs in Close"
	hangsInPoll   = "hangs in Poll"
	hangsInSum    = "hangs in Sum"
	losesItself   = "says ErrLost"
	lostUnseen    = "is lost after its first copy" // and only Info says so
	doesNotOpen   = "does not open"
	firesForAStep = "fires for steps alone" // events of waits without a step have not fired
)

// slowImport is how long slowInImport takes.
const slowImport = 300 * time.Millisecond

type faulty struct {
	cudaipc.Device
	fault string
	two   sync.Map // tickets of peer 2
}

// openFaulty returns OpenMoved and the devices above.
func openFaulty(s mover.Setup) (cudaipc.Device, error) {
	fault := s.Device
	switch fault {
	case hangsInOpen:
		select {}
	case hangsInCopy, hangsInDone, hangsForTwo, hangsInImport, slowInImport, hangsInClose, hangsInPoll, hangsInSum,
		losesItself, firesForAStep:
		s.Device = cudaipc.HostDevice
		d, err := mover.Open(s)
		return &faulty{Device: d, fault: fault}, err
	case lostUnseen:
		s.Device = cudaipc.HostDevice
		d, err := mover.Open(s)
		return &unseen{Device: d}, err
	case doesNotOpen:
		return nil, fmt.Errorf("on purpose: %w", cudaipc.ErrNoCUDA)
	}
	return mover.Open(s)
}

type unseen struct {
	cudaipc.Device
	lost atomic.Bool
}

func (u *unseen) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	u.lost.Store(true)
	return u.Device.Copy(c)
}

func (u *unseen) Info() (i cudaipc.CUDAInfo) {
	if u.lost.Load() {
		i.Lost = "on purpose"
	}
	return i
}

func (f *faulty) is(fault string) {
	if f.fault == fault {
		select {}
	}
}

func (f *faulty) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	f.is(hangsInCopy)
	t, err := f.Device.Copy(c)
	if c.Peer == 2 {
		f.two.Store(t, nil)
	}
	return t, err
}

func (f *faulty) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	f.is(hangsInSum)
	return f.Device.Sum(s)
}

func (f *faulty) Done(t cudaipc.Ticket, timeout time.Duration) (cudaipc.Done, bool, error) {
	f.is(hangsInDone)
	if _, two := f.two.Load(t); two {
		f.is(hangsForTwo)
	}
	if f.fault == losesItself {
		return cudaipc.Done{}, false, fmt.Errorf("on purpose: %w", cudaipc.ErrLost)
	}
	return f.Device.Done(t, timeout)
}

func (f *faulty) Import(im cudaipc.Import) error {
	f.is(hangsInImport)
	if f.fault == slowInImport {
		time.Sleep(slowImport)
	}
	return f.Device.Import(im)
}

func (f *faulty) Close(p cudaipc.PeerID) error {
	f.is(hangsInClose)
	return f.Device.Close(p)
}

func (f *faulty) Poll(w cudaipc.Wait) (cudaipc.State, error) {
	f.is(hangsInPoll)
	s, err := f.Device.Poll(w)
	s.Fired = s.Fired && (f.fault != firesForAStep || w.Step > 0)
	return s, err
}

// fixture is a mover under test, with one engine of 8 MiB as peer 1.
type fixture struct {
	t      *testing.T
	mover  *mover.Mover
	arena  []byte
	engine devicetest.Engine

	mu   sync.Mutex
	lost map[cudaipc.PeerID][]error
}

const regionSize = 8 << 20

// longLimits are limits that no run without a hang comes near, also where the machine is paused
// for seconds.
var longLimits = mover.Limits{
	Tick: 20 * time.Millisecond, Ping: testTimeout, Quiet: testTimeout, Import: testTimeout, Close: testTimeout,
	Poll: testTimeout, Copy: testTimeout, Steady: time.Nanosecond,
}

func newFixture(t *testing.T, change func(*mover.Options)) *fixture {
	t.Helper()
	m := &fixture{t: t, lost: map[cudaipc.PeerID][]error{}}
	f := devicetest.MoverFixture(t, devicetest.MinArena, cudaipc.KindFD, func(o *mover.Options) {
		o.Limits = longLimits
		if change != nil {
			change(o)
		}
	})
	m.mover, m.arena = f.Device.(*mover.Mover), f.Arena
	m.engine = f.Engine(t, devicetest.Spec{Regions: []int64{regionSize}, Events: 1, Revokes: 1})
	if _, err := m.engine.Do(devicetest.Op{Kind: devicetest.Fill, Region: 1, Len: regionSize, Seed: 3}); err != nil {
		t.Fatal(err)
	}
	return m
}

func (m *fixture) imports(id cudaipc.PeerID) cudaipc.Import {
	m.t.Helper()
	im, err := m.engine.Import(id)
	if err != nil {
		m.t.Fatal(err)
	}
	im.Lost = func(err error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.lost[id] = append(m.lost[id], err)
	}
	return im
}

func (m *fixture) attach(id cudaipc.PeerID) {
	m.t.Helper()
	if err := m.mover.Import(m.imports(id)); err != nil {
		m.t.Fatalf("Import: %v", err)
	}
}

func (m *fixture) pid() int {
	m.t.Helper()
	pid := m.mover.Movers()[0].PID
	if pid == 0 {
		m.t.Fatal("no process")
	}
	return pid
}

func (m *fixture) submit(id cudaipc.PeerID, copies int) (tickets []cudaipc.Ticket) {
	m.t.Helper()
	const blocks, n = 32, regionSize / 32
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

func (m *fixture) done(ticket cudaipc.Ticket) cudaipc.Done {
	m.t.Helper()
	d, ok, err := m.mover.Done(ticket, testTimeout)
	if err != nil || !ok {
		m.t.Fatalf("Done = %v, %v after %v", ok, err, testTimeout)
	}
	return d
}

// works checks that peer 1 can be imported and copied from, and closes it.
func (m *fixture) works() {
	m.t.Helper()
	m.attach(1)
	if d := m.done(m.submit(1, 1)[0]); d.Err != nil {
		m.t.Fatalf("copy: %v", d.Err)
	}
	if err := m.mover.Close(1); err != nil {
		m.t.Fatalf("Close: %v", err)
	}
}

// gone reports whether a process has ended and is reaped.
func gone(pid int) bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) }

// expectLost checks a lost peer against Import.Lost, and closes it.
func (m *fixture) expectLost(id cudaipc.PeerID, reason cudaipc.LossReason) {
	m.t.Helper()
	_, err := m.mover.Copy(&cudaipc.Copy{Peer: id})
	_, polled := m.mover.Poll(cudaipc.Wait{Peer: id, Event: 0, Revoke: 0})
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

// told waits until the loss of a peer is reported, once.
func (m *fixture) told(id cudaipc.PeerID) {
	m.t.Helper()
	devicetest.Until(m.t, fmt.Sprintf("the loss of peer %d is told", id), func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		if n := len(m.lost[id]); n > 1 {
			m.t.Fatalf("the loss of peer %d was told %d times, want once", id, n)
		}
		return len(m.lost[id]) == 1
	})
}

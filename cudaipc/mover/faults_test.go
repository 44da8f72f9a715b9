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
	peers atomic.Int32 // imported so far
}

type faultyPeer struct {
	cudaipc.Peer
	of     *faulty
	number int32
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

type unseenPeer struct {
	cudaipc.Peer
	of *unseen
}

func (u *unseen) Import(im cudaipc.Import) (cudaipc.Peer, error) {
	p, err := u.Device.Import(im)
	return &unseenPeer{p, u}, err
}

func (p *unseenPeer) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	p.of.lost.Store(true)
	return p.Peer.Copy(c)
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

func (f *faulty) Import(im cudaipc.Import) (cudaipc.Peer, error) {
	f.is(hangsInImport)
	if f.fault == slowInImport {
		time.Sleep(slowImport)
	}
	p, err := f.Device.Import(im)
	return &faultyPeer{p, f, f.peers.Add(1)}, err
}

func (p *faultyPeer) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	p.of.is(hangsInCopy)
	ticket, err := p.Peer.Copy(c)
	return func(timeout time.Duration) (cudaipc.Done, bool, error) {
		p.of.is(hangsInDone)
		if p.number == 2 {
			p.of.is(hangsForTwo)
		}
		if p.of.fault == losesItself {
			return cudaipc.Done{}, false, fmt.Errorf("on purpose: %w", cudaipc.ErrLost)
		}
		return ticket(timeout)
	}, err
}

func (p *faultyPeer) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	p.of.is(hangsInSum)
	return p.Peer.Sum(s)
}

func (p *faultyPeer) Close() error {
	p.of.is(hangsInClose)
	return p.Peer.Close()
}

func (p *faultyPeer) Poll(w cudaipc.Wait) (cudaipc.State, error) {
	p.of.is(hangsInPoll)
	s, err := p.Peer.Poll(w)
	s.Fired = s.Fired && (p.of.fault != firesForAStep || w.Step > 0)
	return s, err
}

// fixture is a mover under test, with one engine of 8 MiB, which may be several peers.
type fixture struct {
	t      *testing.T
	mover  *mover.Mover
	arena  []byte
	engine devicetest.Engine

	mu    sync.Mutex
	peers map[int]cudaipc.Peer
	lost  map[int][]error
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
	m := &fixture{t: t, peers: map[int]cudaipc.Peer{}, lost: map[int][]error{}}
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

func (m *fixture) imports(id int) cudaipc.Import {
	m.t.Helper()
	im, err := m.engine.Import()
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

// imported imports a peer, until the test's end.
func (m *fixture) imported(id int, im cudaipc.Import) error {
	p, err := m.mover.Import(im)
	if err != nil {
		return err
	}
	m.t.Cleanup(func() { _ = p.Close() }) // again, if the test has closed it
	m.mu.Lock()
	defer m.mu.Unlock()
	m.peers[id] = p
	return nil
}

func (m *fixture) attach(id int) {
	m.t.Helper()
	if err := m.imported(id, m.imports(id)); err != nil {
		m.t.Fatal(err)
	}
}

func (m *fixture) peer(id int) cudaipc.Peer {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.peers[id]
}

func (m *fixture) pid() int {
	m.t.Helper()
	pid := m.mover.Movers()[0].PID
	if pid == 0 {
		m.t.Fatal("no process")
	}
	return pid
}

func (m *fixture) submit(id int, copies int) (tickets []cudaipc.Ticket) {
	m.t.Helper()
	for range copies {
		ticket, err := m.copy(id)
		if err != nil {
			m.t.Fatalf("Copy: %v", err)
		}
		tickets = append(tickets, ticket)
	}
	return tickets
}

// copy submits a copy, which fails if the mover is lost.
func (m *fixture) copy(id int) (cudaipc.Ticket, error) {
	const blocks, n = 32, regionSize / 32
	c := &cudaipc.Copy{Sum: true}
	for b := range blocks {
		c.Runs = append(c.Runs, cudaipc.Run{Region: 1, RegionOff: uint64(b) * n, ArenaOff: int64(b) * n, Len: n})
		c.Blocks = append(c.Blocks, cudaipc.Block{Runs: 1})
	}
	return m.peer(id).Copy(c)
}

func (m *fixture) done(ticket cudaipc.Ticket) cudaipc.Done {
	m.t.Helper()
	d, ok, err := ticket(testTimeout)
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
	if err := m.peer(1).Close(); err != nil {
		m.t.Fatalf("Close: %v", err)
	}
}

// gone reports whether a process has ended and is reaped.
func gone(pid int) bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) }

// expectLost checks a lost peer against Import.Lost, and closes it.
func (m *fixture) expectLost(id int, reason cudaipc.LossReason) {
	m.t.Helper()
	_, err := m.peer(id).Copy(&cudaipc.Copy{})
	_, polled := m.peer(id).Poll(cudaipc.Wait{Event: 0, Revoke: 0})
	for what, err := range map[string]error{"Copy": err, "Poll": polled} {
		var lost *cudaipc.LostError
		if !errors.Is(err, cudaipc.ErrPeer) || !errors.As(err, &lost) || lost.Reason != reason {
			m.t.Errorf("%s of a lost peer: %v, want ErrPeer and the loss (%s)", what, err, reason)
		}
	}
	m.told(id)
	if err := m.peer(id).Close(); err != nil {
		m.t.Errorf("Close of a lost peer: %v", err)
	}
	if n := m.mover.Movers()[0].Lost[reason]; n != 1 {
		m.t.Errorf("%d losses by %q, want 1", n, reason)
	}
}

// told waits until the loss of a peer is reported, once.
func (m *fixture) told(id int) {
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

// Package mover is a device in a process of its own, which owns what a driver call can cost: the
// agent's side (Mover), the process (Run), and the wire between them.
package mover

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/node"
)

// Options say which process a mover is.
type Options struct {
	Name      string              // in errors and figures
	Device    string              // what the process opens, by OpenDevice's names
	GPU       cudaipc.UUID        // zero for a device that is no GPU's
	ArenaFD   int                 // a memfd of at least ArenaSize bytes; stays the caller's, may be closed after New
	ArenaSize int64               // bytes
	Tables    []cudaipc.CopyTable // of types of GPUs: cuda.Options
	// Measure has the first process find out, before it opens its GPU, what Tables do not say of
	// it: some seconds, at most a quarter of Limits.Start.
	Measure bool
	// Informed is told now and then, one call at a time for each process, what a GPU's device says
	// of itself; nil: nobody is.
	Informed func(cudaipc.CUDAInfo)
	// FireOnDeath and Populate are the host device's: host.Options.
	FireOnDeath, Populate bool
	// AskEvents makes Poll ask the process for events. Those of a GPU's peers are asked there in
	// any case; the host's are words that the agent's side reads by itself.
	AskEvents bool
	Command   []string // of the process; nil: this binary, with the argument "mover"
	Env       []string // besides this process's
	Node      int      // NUMA node to bind the process to, its processors and its memory; below 0: none
	Limits    Limits
	// Process is told the number of each process, when it has started and has nothing yet but its
	// socket, and when it is reaped; nil: nobody is.
	Process func(pid int, runs bool)
	// Kill stands in for the kill of a process; nil: SIGKILL. Tests play with it a process that
	// does not come to an end.
	Kill func(*os.Process) error
}

// ForGPU returns the options of the mover of one GPU: named for it, and bound to its NUMA node if
// that is known.
func (o Options) ForGPU(gpu cudaipc.UUID) Options {
	o.Name, o.Device, o.GPU, o.Node = gpu.String(), cudaipc.CUDADevice, gpu, node.NUMANode(gpu)
	o.Env = append(slices.Clone(o.Env), node.GPUEnv(gpu)...)
	return o
}

// Limits are the times of a mover. They stand still while the agent itself does, for they are
// counted in ticks.
type Limits struct {
	Tick time.Duration // how often the mover is looked after
	Ping time.Duration // longest without an answer to a ping
	// the same, while a peer is to be closed or its process is dead: its memory is to be free again
	// soon
	Quiet  time.Duration
	Start  time.Duration // from the start of the process to an open device
	Import time.Duration // one Import
	// the rest of an Import whose peer is gone (Import.Cancelled): its memory is to be free within
	// 2 s
	Cancel time.Duration
	Close  time.Duration // one Close: what is closed is mostly a dead engine's, whose memory is to be free within 2 s
	Poll   time.Duration // one Poll
	Copy   time.Duration // from one end of a copy to the next, of a peer and direction with copies in flight
	Steady time.Duration // a mover that lived so long has not failed to start
	// pause before a start behind the second failure in a row; twice as long after each further one
	Again  time.Duration
	AtMost time.Duration // longest such pause
}

// DefaultLimits are used for every limit that is zero.
var DefaultLimits = Limits{
	Tick: 100 * time.Millisecond, Ping: 5 * time.Second, Quiet: 1200 * time.Millisecond, Start: time.Minute,
	Import: 30 * time.Second, Cancel: 1200 * time.Millisecond, Close: 1500 * time.Millisecond, Poll: 5 * time.Second,
	Copy:   10 * time.Second,
	Steady: 2 * time.Second, Again: 100 * time.Millisecond, AtMost: 5 * time.Second,
}

func (l *Limits) fill() {
	d := &DefaultLimits
	for _, p := range []struct{ v, d *time.Duration }{
		{&l.Tick, &d.Tick}, {&l.Ping, &d.Ping}, {&l.Quiet, &d.Quiet}, {&l.Start, &d.Start}, {&l.Import, &d.Import},
		{&l.Cancel, &d.Cancel}, {&l.Close, &d.Close},
		{&l.Poll, &d.Poll}, {&l.Copy, &d.Copy}, {&l.Steady, &d.Steady}, {&l.Again, &d.Again}, {&l.AtMost, &d.AtMost},
	} {
		if *p.v <= 0 {
			*p.v = *p.d
		}
	}
}

// Mover is a Device in a child process. A driver call that hangs, a stuck copy or a crash costs
// that process: it is killed and reaped, which is the proof that it touches nothing any more, and
// only then its copies end, with bad blocks, and its peers are told to be lost. The next Import
// starts another process.
//
//	agent                                 mover process
//	Copy, Import, Close ──▶ conn ══════▶ server ──▶ lanes ──▶ Device
//	Done ◀── tickets ◀──── life.read ◀══════ ends of copies ◀───────┘
//	Poll: the peer's words, mapped here too; a GPU's event is asked over there
type Mover struct {
	opts  Options
	build string
	arena int // descriptor
	watch func(cudaipc.PeerID, error)
	lives sync.WaitGroup // goroutines of all lives

	starting sync.Mutex     // one start at a time; held over it
	starters sync.WaitGroup // imports that wait for a start, or that left it to itself
	requests atomic.Uint64

	mu struct {
		sync.RWMutex
		life    *life // nil: no process
		peers   map[cudaipc.PeerID]*clientPeer
		tickets cudaipc.Tickets[*clientCopy]
		closed  bool
		history history
		facts   *cudaipc.GPUFacts // nil: no process has told any
	}
}

var (
	_ cudaipc.Device  = (*Mover)(nil)
	_ cudaipc.Watcher = (*Mover)(nil)
)

// New makes a mover without a process: Start or the first Import starts it. Close(AllPeers) frees
// everything.
func New(o Options) (*Mover, error) {
	build, err := buildName()
	if err != nil {
		return nil, err
	}
	arena, err := unix.FcntlInt(uintptr(o.ArenaFD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("arena: %w", err)
	}
	if len(o.Command) == 0 {
		o.Command = []string{"/proc/self/exe", "mover"}
	}
	if o.Kill == nil {
		o.Kill = (*os.Process).Kill
	}
	o.Limits.fill()
	m := &Mover{opts: o, build: build, arena: arena}
	m.mu.peers = map[cudaipc.PeerID]*clientPeer{}
	m.mu.history.lost = map[cudaipc.LossReason]uint64{}
	return m, nil
}

// Watch names the function that is told of lost peers. Called before any Import.
func (m *Mover) Watch(lost func(cudaipc.PeerID, error)) { m.watch = lost }

// Close closes a peer, or with AllPeers the device and its process.
func (m *Mover) Close(id cudaipc.PeerID) error {
	if id == cudaipc.AllPeers {
		return m.closeAll()
	}
	p, err := m.beginClose(id)
	if err != nil {
		return err
	}
	if p.lost == nil {
		err = p.life.closePeer(id)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		p.closing = false
		return err
	}
	m.forgetLocked(p)
	return nil
}

// beginClose makes a peer unreachable while it is closed.
func (m *Mover) beginClose(id cudaipc.PeerID) (*clientPeer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.mu.peers[id]
	switch {
	case m.mu.closed:
		return nil, cudaipc.ErrClosed
	case p == nil || p.opening:
		return nil, fmt.Errorf("peer %d: %w", id, cudaipc.ErrPeer)
	case p.closing || p.view.Busy():
		return nil, fmt.Errorf("peer %d: %w", id, cudaipc.ErrBusy)
	}
	p.closing = true
	return p, nil
}

func (m *Mover) forgetLocked(p *clientPeer) {
	delete(m.mu.peers, p.view.ID)
	m.mu.tickets.Forget(p.view)
	p.view.Close()
}

// closeAll ends the process in order: it closes its regions and says so before it goes.
func (m *Mover) closeAll() error {
	m.starters.Wait()
	m.starting.Lock()
	defer m.starting.Unlock()
	m.mu.Lock()
	if m.mu.closed {
		m.mu.Unlock()
		return cudaipc.ErrClosed
	}
	for id, p := range m.mu.peers {
		if p.opening || p.closing || p.view.Busy() {
			m.mu.Unlock()
			return fmt.Errorf("peer %d: %w", id, cudaipc.ErrBusy)
		}
	}
	m.mu.closed = true
	life := m.mu.life
	m.mu.Unlock()
	var err error
	if life != nil {
		err = life.quit()
	}
	m.lives.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.mu.peers {
		m.forgetLocked(p)
	}
	return errors.Join(err, unix.Close(m.arena))
}

// peerLocked finds a peer that can be used; m.mu is held, for reading at least.
func (m *Mover) peerLocked(id cudaipc.PeerID) (*clientPeer, error) {
	if m.mu.closed {
		return nil, cudaipc.ErrClosed
	}
	p := m.mu.peers[id]
	if p == nil || p.opening || p.closing {
		return nil, fmt.Errorf("peer %d: %w", id, cudaipc.ErrPeer)
	}
	if p.lost != nil {
		return nil, fmt.Errorf("peer %d: %w: %w", id, p.lost, cudaipc.ErrPeer)
	}
	return p, nil
}

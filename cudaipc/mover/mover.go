// Package mover runs a device in a process of its own, so that a failing driver call costs only
// that process: the agent's side (Mover), the process (Run), and the wire between them.
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

// Options of a mover.
type Options struct {
	Name      string       // in errors and figures
	Device    string       // a name for OpenDevice
	GPU       cudaipc.UUID // zero for a device that is no GPU's
	ArenaFD   int          // a memfd of at least ArenaSize bytes; stays the caller's, may be closed after New
	ArenaSize int64        // bytes
	// Informed receives the state of a GPU's device from time to time, one call at a time for
	// each process; may be nil.
	Informed func(cudaipc.CUDAInfo)
	// AskEvents makes Poll ask the process for events. Events of a GPU's peers are always asked
	// there; the host's are words that the agent reads by itself.
	AskEvents bool
	Command   []string // of the process; nil: this binary, with the argument "mover"
	Env       []string // besides this process's
	Node      int      // NUMA node to bind the process to, its processors and its memory; below 0: none
	Limits    Limits
	// Kill replaces the kill of a process in tests, for one that does not end, also at this one's
	// death; nil: SIGKILL.
	Kill        func(*os.Process) error
	deathSignal unix.Signal // that a process gets at the death of this one
}

// ForGPU returns the options of the mover of one GPU: its name, and its NUMA node if known.
func (o Options) ForGPU(gpu cudaipc.UUID) Options {
	o.Name, o.Device, o.GPU, o.Node = gpu.String(), cudaipc.CUDADevice, gpu, node.NUMANode(gpu)
	o.Env = append(slices.Clone(o.Env), node.GPUEnv(gpu)...)
	return o
}

// Limits are the times of a mover, in ticks, so that they stand still while the agent does.
type Limits struct {
	Tick time.Duration // interval of the supervision
	Ping time.Duration // longest without an answer to a ping
	// Quiet replaces Ping while a peer is closed or dead: its memory must be free soon.
	Quiet  time.Duration
	Start  time.Duration // from the start of the process to an open device
	Import time.Duration // one Import
	// Cancel is the rest of a cancelled Import, before the Close of what it has opened.
	Cancel time.Duration
	Close  time.Duration // one Close, mostly of a dead engine's memory, which must be free within 2 s
	Poll   time.Duration // one Poll
	Copy   time.Duration // from one end of a copy to the next, of a peer and direction with copies in flight
	Steady time.Duration // a mover that lived so long did not fail at its start
	// Again is the pause before a start after the second failure in a row; it doubles each time.
	Again  time.Duration
	AtMost time.Duration // longest such pause
}

// DefaultLimits are used for every limit that is zero.
var DefaultLimits = Limits{
	Tick: 100 * time.Millisecond, Ping: 5 * time.Second, Quiet: 1200 * time.Millisecond, Start: time.Minute,
	Import: 30 * time.Second, Cancel: 400 * time.Millisecond, Close: 1500 * time.Millisecond, Poll: 5 * time.Second,
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
// that process: it is killed and reaped, which proves that it touches nothing any more. Only then
// its copies end, with bad blocks, and its peers are reported as lost. The next Import starts
// another process.
//
//	agent                                 mover process
//	Copy, Import, Close ──▶ conn ══════▶ server ──▶ lanes ──▶ Device
//	Done ◀── tickets ◀─ process.read ◀═══ ends of copies ◀──────────┘
//	Poll reads the peer's words, mapped here too; the process asks a GPU's event
type Mover struct {
	opts      Options
	arena     int            // descriptor
	processes sync.WaitGroup // goroutines of all processes

	starting sync.Mutex     // one start at a time; held over it
	starters sync.WaitGroup // starts that imports asked for, cancelled or not
	requests atomic.Uint64

	peers cudaipc.Peers
	mu    struct { // of its processes, too
		sync.RWMutex
		process *process // nil: none runs
		closed  bool
		history history
	}
}

var _ cudaipc.Device = (*Mover)(nil)

// New makes a mover, whose process Start or the first Import starts. Close frees it.
func New(o Options) (*Mover, error) {
	arena, err := unix.FcntlInt(uintptr(o.ArenaFD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("arena: %w", err)
	}
	if len(o.Command) == 0 {
		o.Command = []string{"/proc/self/exe", "mover"}
	}
	if o.Kill == nil {
		o.Kill, o.deathSignal = (*os.Process).Kill, unix.SIGCONT
	}
	o.Limits.fill()
	m := &Mover{opts: o, arena: arena}
	m.mu.history.lost = map[cudaipc.LossReason]uint64{}
	for _, reason := range cudaipc.LossReasons {
		m.mu.history.lost[reason] = 0
	}
	return m, nil
}

// Close ends the process in order: it closes its device and answers before it exits.
func (m *Mover) Close() (err error) {
	if err := m.peers.Close(); err != nil { // first: a node with all GPUs asks, and waits for none
		return err
	}
	m.starters.Wait()
	m.starting.Lock()
	defer m.starting.Unlock()
	m.mu.Lock()
	m.mu.closed = true
	proc := m.mu.process
	m.mu.Unlock()
	if proc != nil {
		err = proc.quit()
	}
	m.processes.Wait()
	return errors.Join(err, unix.Close(m.arena))
}

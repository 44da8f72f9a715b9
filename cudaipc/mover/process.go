package mover

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// process is a process of a Mover, from its start until its end is reported. It has three
// goroutines: run starts and reaps the process and reports its end, read receives its messages,
// supervise checks its limits.
type process struct {
	m    *Mover
	conn *conn
	cmd  *exec.Cmd

	ending chan struct{} // closed when the process is killed or has ended
	reaped chan struct{} // closed when the process is reaped: it touches nothing any more
	ended  chan struct{} // closed when its copies have ended and its lost peers are reported
	joined sync.WaitGroup

	once     sync.Once
	quitting atomic.Bool        // ends in order: its silence is no fault
	reason   cudaipc.LossReason // these two are readable once ending is closed
	cause    error

	clock     atomic.Int64                     // ticks
	pong      atomic.Int64                     // tick of the last answer to a ping
	info      atomic.Pointer[cudaipc.CUDAInfo] // last report of the device; nil: none yet
	informing sync.Mutex                       // over a call of Informed
	begun     time.Time
	bound     string // NUMA binding, or why there is none

	// Under Mover.mu.
	over    bool               // its end is reported
	peers   map[*peer]struct{} // open
	flights map[uint64]flight  // by number
	calls   map[uint64]*call   // by number
	last    uint64             // such number

	closing atomic.Int32 // peers that are being closed
}

// lane counts the copies of one direction of a peer that are in its process.
type lane struct {
	pending int
	since   int64 // the tick since which none has ended
}

func (m *Mover) alive() (*process, error) {
	m.starting.Lock()
	defer m.starting.Unlock()
	m.mu.RLock()
	proc, closed, pause := m.mu.process, m.mu.closed, time.Until(m.mu.history.notBefore)
	m.mu.RUnlock()
	switch {
	case closed:
		return nil, cudaipc.ErrClosed
	case proc != nil:
		select {
		case <-proc.ending:
			return nil, fmt.Errorf("mover %s is being ended (%w): try again", m.opts.Name, proc.err())
		default:
			return proc, nil
		}
	case pause > 0:
		return nil, fmt.Errorf("mover %s failed several times in a row; it is not started again for %v: %w: try later",
			m.opts.Name, pause.Round(time.Millisecond), m.lastLoss())
	}
	return m.start()
}

// aliveFor returns a process for an import. If that is cancelled, a start in progress goes on.
func (m *Mover) aliveFor(im *cudaipc.Import) (*process, error) {
	var proc *process
	var err error
	done := make(chan struct{})
	m.starters.Go(func() {
		defer close(done)
		proc, err = m.alive()
	})
	select {
	case <-done:
		return proc, err
	case <-im.Cancelled:
		return nil, im.CheckCancelled()
	}
}

// Start starts the process if none runs.
func (m *Mover) Start() error {
	_, err := m.alive()
	return err
}

// start runs a process until its device is open. m.starting is held.
func (m *Mover) start() (*process, error) {
	proc, theirs, err := m.newProcess()
	if err != nil {
		return nil, err
	}
	started := make(chan error)
	m.processes.Go(func() { proc.run(theirs, started) })
	if err := <-started; err != nil {
		<-proc.ended
		return nil, err
	}
	m.mu.Lock()
	m.mu.history.starts++
	if !proc.over {
		m.mu.process = proc
	}
	m.mu.Unlock()
	if err := proc.openDevice(); err != nil {
		proc.lose(cudaipc.LostStart, err)
		<-proc.ended // reaped: a process that failed to start leaves nothing open
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.history.opened++
	return proc, nil
}

func (m *Mover) newProcess() (*process, *os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("mover %s: socketpair: %w", m.opts.Name, err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "mover")
	conn, err := newConn(pair[0])
	if err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	proc := &process{
		m: m, conn: conn, begun: time.Now(),
		ending: make(chan struct{}), reaped: make(chan struct{}), ended: make(chan struct{}),
		peers: map[*peer]struct{}{}, flights: map[uint64]flight{}, calls: map[uint64]*call{},
	}
	c := m.opts.Command
	proc.cmd = exec.Command(c[0], c[1:]...)
	proc.cmd.Env = append(os.Environ(), m.opts.Env...)
	proc.cmd.Stderr = os.Stderr
	proc.cmd.ExtraFiles = []*os.File{theirs}
	// What this process inherited is not for a mover, which may outlive it (from Linux 5.11 on).
	_ = unix.CloseRange(socketFD, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	// A session of its own: the terminal's signals are the agent's. For Pdeathsig see Run.
	proc.cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true, Pdeathsig: m.opts.deathSignal}
	return proc, theirs, nil
}

// run owns the process. Its thread lives exactly as long as the process: the parent-death signal
// comes at the death of the starting thread, and the thread may be bound to a node, which the
// process inherits.
func (p *process) run(theirs *os.File, started chan<- error) {
	runtime.LockOSThread()
	p.bound = bindThread(p.m.opts.Node)
	err := p.cmd.Start()
	_ = theirs.Close() // the process has it
	if err == nil {
		p.joined.Go(p.read)
		p.joined.Go(p.supervise)
	} else {
		err = fmt.Errorf("mover %s: %w", p.m.opts.Name, err)
		p.lose(cudaipc.LostStart, err)
	}
	started <- err
	if err == nil {
		_ = p.cmd.Wait() // the status is in ProcessState
		p.lose(cudaipc.LostCrash, fmt.Errorf("it ended by itself: %v", p.cmd.ProcessState))
	}
	close(p.reaped)
	p.end()
}

// quit ends the process in order and returns when it is reaped.
func (p *process) quit() error {
	err := p.closePeer(allPeers)
	p.quitting.Store(true)
	p.conn.close()
	if !cudaipc.ClosesWithin(p.reaped, endWait) {
		p.lose(cudaipc.LostCall, errors.New("it did not end by itself"))
	}
	<-p.ended
	if code := p.cmd.ProcessState.ExitCode(); code > 0 {
		err = errors.Join(err, fmt.Errorf("mover %s ended with code %d", p.m.opts.Name, code))
	}
	return err
}

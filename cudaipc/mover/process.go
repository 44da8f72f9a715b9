package mover

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// life is one process of a Mover, from its start until its end is reported. It has three
// goroutines: run starts and reaps the process and reports its end, read receives its messages,
// supervise checks its limits.
type life struct {
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

	clock    atomic.Int64           // ticks
	pong     atomic.Int64           // tick of the last answer to a ping
	info     atomic.Pointer[[]byte] // last report of the device; nil: none yet
	informed atomic.Bool            // the last question was answered
	begun    time.Time
	bound    string // NUMA binding, or why there is none
	over     bool   // under Mover.mu: its end is reported

	calls calls
}

// alive returns the running life, or starts one.
func (m *Mover) alive() (*life, error) {
	m.starting.Lock()
	defer m.starting.Unlock()
	m.mu.RLock()
	life, closed, pause := m.mu.life, m.mu.closed, time.Until(m.mu.history.notBefore)
	m.mu.RUnlock()
	switch {
	case closed:
		return nil, cudaipc.ErrClosed
	case life != nil:
		select {
		case <-life.ending:
			return nil, fmt.Errorf("mover %s is being ended (%w): try again", m.opts.Name, life.err())
		default:
			return life, nil
		}
	case pause > 0:
		return nil, fmt.Errorf("mover %s failed several times in a row; it is not started again for %v: %w: try later",
			m.opts.Name, pause.Round(time.Millisecond), m.lastLoss())
	}
	return m.start()
}

// aliveFor returns a life for an import. If the import is cancelled, a start in progress
// continues without it.
func (m *Mover) aliveFor(im *cudaipc.Import) (*life, error) {
	var life *life
	var err error
	done := make(chan struct{})
	m.starters.Go(func() {
		defer close(done)
		life, err = m.alive()
	})
	select {
	case <-done:
		return life, err
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
func (m *Mover) start() (*life, error) {
	l, theirs, err := m.newLife()
	if err != nil {
		return nil, err
	}
	started := make(chan error)
	m.lives.Go(func() { l.run(theirs, started) })
	if err := <-started; err != nil {
		<-l.ended
		return nil, err
	}
	m.enter(l)
	if err := l.openDevice(); err != nil {
		l.lose(cudaipc.LostStart, err)
		<-l.ended // reaped: a process that failed to start leaves nothing open
		return nil, err
	}
	l.ask(l.clock.Load())
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.history.opened++
	return l, nil
}

// enter makes a life the mover's current one, unless it has ended already.
func (m *Mover) enter(l *life) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.history.starts++
	if !l.over {
		m.mu.life = l
	}
}

func (m *Mover) newLife() (*life, *os.File, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("mover %s: socketpair: %w", m.opts.Name, err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "mover")
	conn, err := newConn(pair[0])
	if err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	l := &life{
		m: m, conn: conn, begun: time.Now(),
		ending: make(chan struct{}), reaped: make(chan struct{}), ended: make(chan struct{}),
	}
	l.calls.init()
	l.informed.Store(true)
	c := m.opts.Command
	l.cmd = exec.Command(c[0], c[1:]...)
	l.cmd.Env = append(os.Environ(), m.opts.Env...)
	l.cmd.Stderr = os.Stderr
	l.cmd.ExtraFiles = []*os.File{theirs}
	// A session of its own: the terminal's signals are the agent's. The parent-death signal is
	// Run's.
	l.cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true, Pdeathsig: unix.SIGTERM}
	return l, theirs, nil
}

// run owns the process. Its thread lives exactly as long as the process: the parent-death signal
// comes at the death of the starting thread, and the thread may be bound to a node, which the
// process inherits.
func (l *life) run(theirs *os.File, started chan<- error) {
	runtime.LockOSThread()
	l.bound = bindThread(l.m.opts.Node)
	err := l.cmd.Start()
	_ = theirs.Close() // the process has it
	if err == nil {
		l.m.reportProcess(l.cmd.Process.Pid, true)
		l.joined.Go(l.read)
		l.joined.Go(l.supervise)
	} else {
		err = fmt.Errorf("mover %s: %w", l.m.opts.Name, err)
		l.lose(cudaipc.LostStart, err)
	}
	started <- err
	if err == nil {
		_ = l.cmd.Wait() // the status is in ProcessState
		l.m.reportProcess(l.cmd.Process.Pid, false)
		l.lose(cudaipc.LostCrash, fmt.Errorf("it ended by itself: %v", l.cmd.ProcessState))
	}
	close(l.reaped)
	l.end()
}

// reportProcess reports the start and the end of a process.
func (m *Mover) reportProcess(pid int, runs bool) {
	if m.opts.Process != nil {
		m.opts.Process(pid, runs)
	}
}

// quit ends the process in order and returns when it is reaped.
func (l *life) quit() error {
	err := l.closePeer(cudaipc.AllPeers)
	l.quitting.Store(true)
	l.conn.close()
	if !closesWithin(l.reaped, endWait) {
		l.lose(cudaipc.LostCall, errors.New("it did not end by itself"))
	}
	<-l.ended
	if code := l.cmd.ProcessState.ExitCode(); code > 0 {
		err = errors.Join(err, fmt.Errorf("mover %s ended with code %d", l.m.opts.Name, code))
	}
	return err
}

// closesWithin waits for a channel to be closed.
func closesWithin(c <-chan struct{}, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-c:
		return true
	case <-timer.C:
		return false
	}
}

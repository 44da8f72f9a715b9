package mooncake

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// helper is a process and what was asked of it. It is used until it is reaped, and never again.
type helper struct {
	conn    *net.UnixConn
	cmd     *exec.Cmd
	said    tail
	send    chan *request // room for all that can be asked at once
	reaped  chan struct{} // closed when the process is gone: it touches no memory any more
	exit    error         // of the process; set before reaped is closed
	useless chan struct{} // has one when it is to be replaced
	owned   sync.WaitGroup

	mu struct {
		sync.Mutex
		last    uint64
		pending map[uint64]*request
		over    bool // nothing more is asked
		killed  error
	}
}

// startHelper starts the process. Its caller's thread must live as long as the process.
func startHelper(o *Options) (*helper, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socketpair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "helper"), os.NewFile(uintptr(fds[1]), "agent")
	defer ours.Close()
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, fmt.Errorf("socketpair: %w", err)
	}
	h := &helper{conn: conn.(*net.UnixConn), send: make(chan *request, 2*o.Concurrency), reaped: make(chan struct{}), useless: make(chan struct{}, 1)}
	h.mu.pending = map[uint64]*request{}
	h.cmd = exec.Command(o.Python, "-m", module, "serve", "3")
	h.cmd.ExtraFiles, h.cmd.Env, h.cmd.Stderr = []*os.File{theirs}, o.environment(), &h.said
	h.cmd.WaitDelay = time.Second
	// A process group of its own keeps a terminal's signals from it. A session of its own would be
	// a scheduling group of its own (sched_autogroup_enabled), and each time that one of the
	// client's threads hands its work to another it would wait for the turns of all sessions that
	// compute.
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := h.cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("helper: %w", err), conn.Close())
	}
	h.owned.Go(func() {
		h.exit = h.cmd.Wait()
		close(h.reaped)
	})
	return h, nil
}

// greet hands the memory over and waits until the client has connected.
func (h *helper) greet(o *Options, host string, bounce *Memory) error {
	if err := h.conn.SetDeadline(time.Now().Add(o.SetupWithin)); err != nil {
		return err
	}
	fds := []int{bounce.FD}
	if len(o.Arena.Base) > 0 {
		fds = append(fds, o.Arena.FD)
	}
	hello := encodeHello(o, host)
	n, _, err := h.conn.WriteMsgUnix(hello, unix.UnixRights(fds...), nil)
	if err == nil && n < len(hello) {
		_, err = h.conn.Write(hello[n:])
	}
	if err != nil {
		return fmt.Errorf("helper: %w %s", err, h.said.reason())
	}
	b, err := readFrame(h.conn)
	if err != nil {
		return fmt.Errorf("helper: no connection within %v: %w %s", o.SetupWithin, err, h.said.reason())
	}
	w, err := decodeWelcome(b)
	if err == nil && w.reason != "" {
		err = fmt.Errorf("helper: %s", w.reason)
	}
	return errors.Join(err, h.conn.SetDeadline(time.Time{}))
}

// work starts to carry requests.
func (h *helper) work(silence time.Duration) {
	h.owned.Go(h.write)
	h.owned.Go(h.read)
	h.owned.Go(func() { h.watch(silence) })
}

// kill ends the process at once. It does not wait until it is reaped.
func (h *helper) kill() { h.killFor(errors.New("closed")) }

func (h *helper) killFor(reason error) {
	h.mu.Lock()
	if h.mu.killed == nil {
		h.mu.killed = reason
	}
	h.mu.Unlock()
	_ = h.cmd.Process.Kill() // it has ended already, or does now
}

// leave lets the client tell the master that its segment goes; not for long.
func (h *helper) leave(within time.Duration) {
	h.conn.CloseWrite()
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-h.reaped:
	case <-timer.C:
		h.kill()
		<-h.reaped
	}
}

// end reaps the process, fails what it was asked, and joins its goroutines.
func (h *helper) end() {
	h.kill()
	<-h.reaped
	_ = h.conn.Close()
	h.mu.Lock()
	h.mu.over = true
	close(h.send)
	for id, r := range h.mu.pending {
		delete(h.mu.pending, id)
		r.settle(nil)
	}
	h.mu.Unlock()
	h.owned.Wait()
}

// why is why the process ended, once it is reaped.
func (h *helper) why() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.killed != nil {
		return fmt.Errorf("helper: killed: %w", h.mu.killed)
	}
	if h.exit == nil {
		return errors.New("helper: ended by itself")
	}
	return fmt.Errorf("helper: ended: %w %s", h.exit, h.said.reason())
}

func (h *helper) wasKilled() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.killed != nil
}

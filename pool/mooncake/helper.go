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

	"github.com/kvagent/kvagent/pool/remote"
)

// helper is a process and the requests sent to it. It is used until it is reaped, and not started
// again.
type helper struct {
	conn    *net.UnixConn
	cmd     *exec.Cmd
	stderr  tail
	send    chan *request // has room for all requests that can be open
	reaped  chan struct{} // closed when the process has ended and touches no memory any more
	exit    error         // of the process; set before reaped is closed
	replace chan struct{} // has an element when the helper is to be replaced
	owned   sync.WaitGroup

	mu struct {
		sync.Mutex
		last    uint64
		pending map[uint64]*request
		over    bool // no more requests are accepted
		killed  error
	}
}

// startHelper starts a Python module as a helper of so many requests at once, which may use so many
// bytes of memory besides what it shares. The calling thread must live as long as the process.
func startHelper(python, module string, env []string, requests int, memory int64) (*helper, error) {
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
	h := &helper{
		conn:   conn.(*net.UnixConn),
		send:   make(chan *request, requests),
		reaped: make(chan struct{}), replace: make(chan struct{}, 1),
	}
	h.mu.pending = map[uint64]*request{}
	h.cmd = exec.Command(python, "-m", module, "serve", "3")
	h.cmd.ExtraFiles, h.cmd.Env, h.cmd.Stderr = []*os.File{theirs}, env, &h.stderr
	h.cmd.WaitDelay = time.Second
	// Its own process group keeps a terminal's signals from it. Its own session would also be its
	// own scheduling group (sched_autogroup_enabled): each time one of the client's threads hands
	// work to another, it would wait for its turn among all sessions that compute.
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := h.cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("helper: %w", err), conn.Close())
	}
	h.owned.Go(func() {
		h.exit = h.cmd.Wait()
		close(h.reaped)
	})
	h.owned.Go(func() { h.bound(memory) })
	return h, nil
}

// boundEvery is how often a helper's memory is read. Within this time it grows by a few MiB.
const boundEvery = 10 * time.Millisecond

// bound kills a helper that uses too much memory: its library takes what servers send.
func (h *helper) bound(memory int64) {
	tick := time.NewTicker(boundEvery)
	defer tick.Stop()
	name := fmt.Sprintf("/proc/%d/statm", h.cmd.Process.Pid)
	for {
		select {
		case <-h.reaped:
			return
		case <-tick.C:
			var size, resident, shared int64
			text, err := os.ReadFile(name)
			if err == nil {
				_, err = fmt.Sscan(string(text), &size, &resident, &shared) // pages: proc(5)
			}
			if used := (resident - shared) * int64(os.Getpagesize()); err == nil && used > memory {
				h.killFor(fmt.Errorf("%w: %d bytes of memory, allowed: %d", remote.ErrAnswer, used, memory))
			}
		}
	}
}

// handshake passes the memory to the helper and waits until its client has connected.
func (h *helper) handshake(o *Options, host string, bounce *Memory) error {
	fds := []int{bounce.FD}
	if len(o.Arena.Base) > 0 {
		fds = append(fds, o.Arena.FD)
	}
	b, err := h.greet(encodeHello(o, host), fds, o.SetupWithin)
	if err != nil {
		return err
	}
	w, err := decodeWelcome(b)
	if err == nil && w.reason != "" {
		err = fmt.Errorf("helper: %s", w.reason)
	}
	return err
}

// greet sends the first frame with descriptors, and returns the helper's first frame.
func (h *helper) greet(hello []byte, fds []int, within time.Duration) ([]byte, error) {
	if err := h.conn.SetDeadline(time.Now().Add(within)); err != nil {
		return nil, err
	}
	n, _, err := h.conn.WriteMsgUnix(hello, unix.UnixRights(fds...), nil)
	if err == nil && n < len(hello) {
		_, err = h.conn.Write(hello[n:])
	}
	if err != nil {
		return nil, fmt.Errorf("helper: %w %s", err, h.stderr.reason())
	}
	b, err := readFrame(h.conn)
	if err != nil {
		return nil, fmt.Errorf("helper: no connection within %v: %w %s", within, err, h.stderr.reason())
	}
	return b, h.conn.SetDeadline(time.Time{})
}

// work starts the goroutines that serve requests.
func (h *helper) work(silence time.Duration) {
	h.owned.Go(h.write)
	h.owned.Go(h.read)
	h.owned.Go(func() { h.watch(silence) })
}

// kill ends the process at once, without waiting until it is reaped.
func (h *helper) kill() { h.killFor(errors.New("closed")) }

func (h *helper) killFor(reason error) {
	h.mu.Lock()
	if h.mu.killed == nil {
		h.mu.killed = reason
	}
	h.mu.Unlock()
	_ = h.cmd.Process.Kill() // an error means that it has ended already
}

// leave lets the client deregister its segment at the master, and kills it after within.
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

// end reaps the process, fails its open requests, and joins its goroutines.
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

// why returns why the process ended. It must have been reaped.
func (h *helper) why() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.killed != nil {
		return fmt.Errorf("helper: killed: %w", h.mu.killed)
	}
	if h.exit == nil {
		return errors.New("helper: ended by itself")
	}
	return fmt.Errorf("helper: ended: %w %s", h.exit, h.stderr.reason())
}

func (h *helper) wasKilled() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.killed != nil
}

package mooncake

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool/remote"
)

// helper is a process, from its start until it is reaped, and the requests sent to it.
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
	b, err := h.greet(o.hello(host), fds, o.SetupWithin)
	if err != nil {
		return err
	}
	w, err := decode[welcome](b)
	if err != nil {
		return err
	}
	return checkWelcome(w.Version, w.Reason)
}

func (o *Options) hello(host string) *hello {
	return &hello{
		Version: wireVersion,
		Settings: clientSettings{
			Host: host, Metadata: o.Metadata, Segment: o.Segment, LocalBuffer: o.LocalBuffer, Protocol: o.Protocol,
			Devices: o.Devices, Master: o.Master, Replicas: o.Replicas, Concurrency: o.Concurrency,
		},
		Bounce: o.Bounce, Arena: int64(len(o.Arena.Base)),
	}
}

// greet sends the first frame with descriptors, and returns the helper's first frame.
func (h *helper) greet(frame any, fds []int, within time.Duration) ([]byte, error) {
	hello := encode(frame)
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

// replaceSoon has the helper replaced.
func (h *helper) replaceSoon() {
	select {
	case h.replace <- struct{}{}:
	default: // it is to be replaced already
	}
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

// module is the helper's module in the Python package kvagent.
const module = "kvagent.mooncake"

// checkPython returns an error that names what is to be installed, if anything is, or the memory
// that Python takes with the client, in bytes.
func checkPython(o *Options) (memory int64, err error) {
	path, err := exec.LookPath(o.Python)
	if err != nil {
		return 0, fmt.Errorf("mooncake: Python is %q, which is not installed: install Python 3.10 or newer, "+
			"then pip install kvagent mooncake-transfer-engine: %w", o.Python, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), checkWithin)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "-m", module, "check")
	cmd.Env = o.environment()
	out, err := cmd.CombinedOutput()
	if err == nil {
		usage, _ := cmd.ProcessState.SysUsage().(*syscall.Rusage)
		return usage.Maxrss << 10, nil
	}
	text := lastLine(out)
	if strings.Contains(text, "kvagent") && !strings.HasPrefix(text, module) {
		text += ": pip install kvagent mooncake-transfer-engine"
	}
	return 0, fmt.Errorf("mooncake: Python at %s: %w: %s", path, err, text)
}

func lastLine(out []byte) string {
	lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	return string(lines[len(lines)-1])
}

// environment returns the helper's environment: limits of its waiting, then what the caller set.
func (o *Options) environment() []string {
	rpc := strconv.FormatInt(o.RPCWithin.Milliseconds(), 10)
	env := append(os.Environ(), "MC_RPC_TIMEOUT_MS="+rpc, "MC_RPC_CONNECT_TIMEOUT_MS="+rpc, "PYTHONUNBUFFERED=1")
	return append(env, o.Env...)
}

// newMemory maps zeroed memory that can be shared.
func newMemory(bytes int64) (Memory, error) {
	fd, err := unix.MemfdCreate("kvagent-mooncake", unix.MFD_CLOEXEC)
	if err != nil {
		return Memory{}, fmt.Errorf("mooncake: bounce memory: memfd: %w", err)
	}
	if err = unix.Ftruncate(fd, bytes); err == nil {
		var base []byte
		if base, err = unix.Mmap(fd, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
			return Memory{Base: base, FD: fd}, nil
		}
	}
	return Memory{}, errors.Join(fmt.Errorf("mooncake: bounce memory of %d bytes: %w", bytes, err), unix.Close(fd))
}

func (m *Memory) close() error { return errors.Join(unix.Munmap(m.Base), unix.Close(m.FD)) }

func (m *Memory) offset(data []byte) (int64, bool) {
	if len(data) == 0 || len(data) > len(m.Base) {
		return 0, false
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(data)))
	base := uintptr(unsafe.Pointer(unsafe.SliceData(m.Base)))
	if at < base || at-base > uintptr(len(m.Base)-len(data)) {
		return 0, false
	}
	return int64(at - base), true
}

// hostName returns the name of this node if none was given.
func (s *Store) hostName() (string, error) {
	if s.o.Host != "" {
		return s.o.Host, nil
	}
	return os.Hostname()
}

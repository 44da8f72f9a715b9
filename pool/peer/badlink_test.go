package peer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool/pooltest"
)

// namespace is a network namespace with one interface, whose packets the test carries. It lives as
// long as its descriptors.
type namespace struct {
	addr    string
	packets *os.File // of the interface
	work    chan func()
	ended   sync.WaitGroup
}

// newNamespace makes a namespace with an address. The error is that it cannot be had here.
func newNamespace(addr string) (n *namespace, err error) {
	n = &namespace{addr: addr, work: make(chan func())}
	made := make(chan error)
	n.ended.Go(func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := n.open()
		made <- err
		for f := range n.work {
			f()
		}
	})
	if err = <-made; err != nil {
		n.close()
	}
	return n, err
}

// open leaves the process's namespace for a new one, and makes the interface.
func (n *namespace) open() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("a network namespace: %w", err)
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("/dev/net/tun: %w", err)
	}
	request, err := unix.NewIfreq("kv0")
	if err == nil {
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	n.packets = os.NewFile(uintptr(fd), "tun") // not earlier: a poller sees what it is now
	if err != nil {
		return fmt.Errorf("an interface: %w", err)
	}
	return n.configure()
}

// configure gives the interface its address, and the other's, and switches it on.
func (n *namespace) configure() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for _, set := range []struct {
		request uint
		addr    string
	}{{unix.SIOCSIFADDR, n.addr}, {unix.SIOCSIFNETMASK, "255.255.255.0"}} {
		request, err := unix.NewIfreq("kv0")
		if err != nil {
			return err
		}
		ip := netip.MustParseAddr(set.addr).As4()
		if err = request.SetInet4Addr(ip[:]); err != nil {
			return err
		}
		if err = unix.IoctlIfreq(fd, set.request, request); err != nil {
			return fmt.Errorf("address %s: %w", set.addr, err)
		}
	}
	request, err := unix.NewIfreq("kv0")
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request)
}

// do runs f on a thread of the namespace.
func (n *namespace) do(f func()) {
	done := make(chan struct{})
	n.work <- func() {
		defer close(done)
		f()
	}
	<-done
}

func (n *namespace) close() {
	close(n.work)
	if n.packets != nil {
		_ = n.packets.Close()
	}
	n.ended.Wait()
}

// dial connects from the namespace.
func (n *namespace) dial(ctx context.Context, addr string) (c net.Conn, err error) {
	n.do(func() { c, err = (&net.Dialer{}).DialContext(ctx, "tcp4", addr) })
	return c, err
}

// badLink joins two namespaces. It delays packets, loses some, and can be cut in each direction.
type badLink struct {
	delay time.Duration
	lost  float64 // part of the packets
	dice  [2]*rand.Rand
	cut   [2]atomic.Bool
	over  chan struct{}
	count struct{ carried, lost atomic.Int64 }
}

type packet struct {
	bytes []byte
	due   time.Time
}

// queuedPackets is how many packets a link holds; one more is lost.
const queuedPackets = 1 << 12

// newBadLink returns two joined namespaces, or skips the test.
func newBadLink(t *testing.T, delay time.Duration, lost float64) (*badLink, [2]*namespace) {
	t.Helper()
	var ends [2]*namespace
	for i, addr := range []string{"10.99.0.1", "10.99.0.2"} {
		n, err := newNamespace(addr)
		if err != nil {
			fmt.Fprintf(os.Stderr, "!!!! %s is LEFT OUT: it needs root and /dev/net/tun: %v\n", t.Name(), err)
			t.Skip(err)
		}
		t.Cleanup(n.close)
		ends[i] = n
	}
	seed := testSeed(t)
	l := &badLink{delay: delay, lost: lost, over: make(chan struct{})}
	var carrying sync.WaitGroup
	for i := range ends {
		l.dice[i] = rand.New(rand.NewPCG(seed, uint64(i)))
		queue := make(chan packet, queuedPackets)
		carrying.Go(func() { l.take(i, ends[i], queue) })
		carrying.Go(func() { l.deliver(ends[1-i], queue) })
	}
	t.Cleanup(func() {
		close(l.over)
		for _, n := range ends {
			_ = n.packets.Close()
		}
		carrying.Wait()
		t.Logf("%d packets carried, %d lost", l.count.carried.Load(), l.count.lost.Load())
	})
	return l, ends
}

// take reads the packets of one direction, until the interface is closed.
func (l *badLink) take(direction int, from *namespace, queue chan<- packet) {
	b := make([]byte, 1<<16)
	for {
		n, err := from.packets.Read(b)
		if err != nil {
			return
		}
		if l.dice[direction].Float64() < l.lost || l.cut[direction].Load() {
			l.count.lost.Add(1)
			continue
		}
		select {
		case queue <- packet{append([]byte(nil), b[:n]...), time.Now().Add(l.delay)}:
			l.count.carried.Add(1)
		default:
			l.count.lost.Add(1)
		}
	}
}

// deliver writes packets when they are due.
func (l *badLink) deliver(to *namespace, queue <-chan packet) {
	for {
		select {
		case p := <-queue:
			time.Sleep(time.Until(p.due))
			if _, err := to.packets.Write(p.bytes); errors.Is(err, os.ErrClosed) {
				return
			}
		case <-l.over:
			return
		}
	}
}

// far is two agents at the ends of a bad link.
type far struct {
	link     *badLink
	from, to *agent
	server   *Server
	client   *Client
	addr     string
}

func newFar(t *testing.T, delay time.Duration, lost float64) *far {
	t.Helper()
	link, ends := newBadLink(t, delay, lost)
	spec := specOf(1, 16<<10)
	f := &far{link: link, from: newAgent(t, 16<<20, spec), to: newAgent(t, 16<<20, spec)}
	var l net.Listener
	var err error
	ends[0].do(func() { l, err = net.Listen("tcp4", ends[0].addr+":0") })
	check(t, err)
	f.addr = l.Addr().String()
	cfg, clientCfg := f.from.config(), f.to.clientConfig()
	clientCfg.Dial, clientCfg.BreakFirst, clientCfg.BreakLast = ends[1].dial, 10*time.Millisecond, 10*time.Millisecond
	f.server, f.client = serveOn(t, l, cfg), newClient(t, clientCfg)
	return f
}

// fetches fetches a chain until the peer can be reached, and checks every byte.
func (f *far) fetches(t *testing.T, name string, blocks int) {
	t.Helper()
	h := chain(name, blocks)
	f.from.save(h)
	var res Result
	pooltest.Until(t, "a fetch that ends by itself", func() bool {
		var err error
		res, err = fetchAll(t, f.client, f.addr, f.to.request("", h))
		return err == nil
	})
	if got := f.to.has(h); got != 2*blocks {
		t.Errorf("%d blocks are there, want %d: %+v", got, 2*blocks, res)
	}
	t.Logf("%d blocks in %v", res.Blocks, res.Took)
}

// Two agents in two network namespaces, 20 ms apart each way, with one packet of a hundred lost:
// every block arrives. Then the link is cut in the middle of a fetch, both ways or one: the fetch
// ends by the peer's time, not by the kernel's, which is minutes, nothing stays reserved or pinned,
// and when the link is back the blocks arrive.
func TestFetchOverABadLink(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: several nodes")
	}
	f := newFar(t, 20*time.Millisecond, 0.01)
	f.fetches(t, "first", 40)
	for _, c := range []struct {
		name string
		cut  []int
	}{{"both ways", []int{0, 1}}, {"to the client", []int{0}}, {"to the server", []int{1}}} {
		h := chain(c.name, 60)
		f.from.save(h)
		cut := func(is bool) {
			for _, direction := range c.cut {
				f.link.cut[direction].Store(is)
			}
		}
		begin := time.Now()
		stored := func(int, int64) { cut(true) }
		_, err := fetchWith(context.Background(), t, f.client, f.addr, f.to.request("", h), stored)
		if !errors.Is(err, ErrLost) {
			t.Errorf("%s: the fetch ended with %v", c.name, err)
		}
		if took := time.Since(begin); took > time.Minute {
			t.Errorf("%s: the fetch took %v", c.name, took)
		}
		f.to.nothingLeft()
		pooltest.Until(t, "the server's loss", func() bool { return f.server.Stats().Connections == 0 })
		f.from.nothingLeft()
		cut(false)
		f.fetches(t, c.name, 60)
	}
}

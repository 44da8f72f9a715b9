package mover

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// Limits of the socket between an agent and its mover. A message is cut into packets, so that it
// may have any length and any number of descriptors up to these.
const (
	maxMessage  = 64 << 20 // bytes of one message: a copy of MaxCopyRuns runs and as many blocks has 32 MiB
	packetBytes = 60 << 10 // bytes of a packet; the kernel takes three and more of them before a writer waits
	packetFDs   = 250      // descriptors of a packet; Linux allows 253
	maxFDs      = cudaipc.MaxRegions + 2
)

// The first byte of each packet.
const (
	packetMore byte = iota // the message goes on
	packetLast             // the message ends here
)

// errWire is wrapped by errors of malformed messages.
var errWire = errors.New("malformed message")

// conn is an end of the socket pair: messages with descriptors. One goroutine receives; any sends.
type conn struct {
	conn *net.UnixConn

	sending sync.Mutex // over all packets of a message
	out     []byte     // of the sender

	in, oob []byte // of the receiver
}

// newConn takes over a descriptor of a SOCK_SEQPACKET socket pair, also when it fails.
func newConn(fd int) (*conn, error) {
	file := os.NewFile(uintptr(fd), "mover")
	defer file.Close()
	end, err := net.FileConn(file)
	if err != nil {
		return nil, fmt.Errorf("mover's socket: %w", err)
	}
	unixConn, ok := end.(*net.UnixConn)
	if !ok {
		_ = end.Close()
		return nil, fmt.Errorf("mover's socket: %T is not a Unix socket", end)
	}
	return &conn{
		conn: unixConn, out: make([]byte, 0, packetBytes+1),
		in: make([]byte, packetBytes+1), oob: make([]byte, unix.CmsgSpace(4*(packetFDs+3))),
	}, nil
}

// send sends one message; the descriptors stay the caller's. It waits at most until deadline for
// the other side to take it. An error leaves the connection usable only if errors.Is(err,
// errNotSent).
func (c *conn) send(msg []byte, fds []int, deadline time.Time) error {
	if len(msg) > maxMessage || len(fds) > maxFDs {
		return fmt.Errorf("%d bytes and %d descriptors, at most %d and %d: %w: %w",
			len(msg), len(fds), maxMessage, maxFDs, errNotSent, cudaipc.ErrRange)
	}
	c.sending.Lock()
	defer c.sending.Unlock()
	_ = c.conn.SetWriteDeadline(deadline) // fails only on a closed connection, which the write reports
	for first := true; first || len(msg) > 0 || len(fds) > 0; first = false {
		n, f := min(len(msg), packetBytes), min(len(fds), packetFDs)
		kind := packetMore
		if n == len(msg) && f == len(fds) {
			kind = packetLast
		}
		err := c.packet(kind, msg[:n], fds[:f])
		if first && (errors.Is(err, unix.ETOOMANYREFS) || errors.Is(err, unix.EBADF)) {
			return fmt.Errorf("%w: %w", errNotSent, err) // the kernel refused to carry its descriptors
		}
		if err != nil {
			return err
		}
		msg, fds = msg[n:], fds[f:]
	}
	return nil
}

// errNotSent reports that the other side received nothing of a message, and may be sent others.
var errNotSent = errors.New("not sent")

func (c *conn) packet(kind byte, part []byte, fds []int) error {
	c.out = append(append(c.out[:0], kind), part...)
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := c.conn.WriteMsgUnix(c.out, oob, nil)
	return err
}

// receive returns the next message and its descriptors. The bytes are valid until the next call;
// the descriptors are the caller's, and fewer than were sent if this process has reached its
// limit.
func (c *conn) receive(msg []byte) ([]byte, []int, error) {
	msg = msg[:0]
	var fds []int
	for {
		n, oobn, _, _, err := c.conn.ReadMsgUnix(c.in, c.oob)
		if err != nil {
			closeAll(fds)
			return nil, nil, err
		}
		if oobn > 0 {
			fds = append(fds, rights(c.oob[:oobn])...)
		}
		if len(msg)+n > maxMessage || len(fds) > maxFDs || n == 0 {
			closeAll(fds)
			return nil, nil, fmt.Errorf("%d bytes and %d descriptors: %w", len(msg)+n, len(fds), errWire)
		}
		msg = append(msg, c.in[1:n]...)
		switch c.in[0] {
		case packetLast:
			return msg, fds, nil
		case packetMore:
		default:
			closeAll(fds)
			return nil, nil, fmt.Errorf("packet of kind %d: %w", c.in[0], errWire)
		}
	}
}

// rights returns the descriptors in control data; the kernel closes what it could not give.
func rights(oob []byte) (fds []int) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range messages {
		got, err := unix.ParseUnixRights(&messages[i])
		if err == nil {
			fds = append(fds, got...)
		}
	}
	return fds
}

func (c *conn) close() { _ = c.conn.Close() }

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// call is a request without an answer yet; a few of each worker of an engine.
type call struct {
	what  string
	until int64         // tick; under Mover.mu
	state cudaipc.State // these two are readable once done is closed
	err   error
	done  chan struct{} // closed after the call was taken
}

// takeCall removes a call, which is nil if there is none.
func (p *process) takeCall(number uint64) *call {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	call := p.calls[number]
	delete(p.calls, number)
	return call
}

// call sends what request makes of its number, and waits for the answer. After limit, or
// Limits.Cancel after cancelled is closed, the mover is lost; the wait ends when it is reaped.
func (p *process) call(what string, limit time.Duration, cancelled <-chan struct{},
	request func(number uint64) ([]byte, []int)) (cudaipc.State, error) {
	call := &call{what: what, until: p.clock.Load() + p.ticks(limit), done: make(chan struct{})}
	p.m.mu.Lock()
	if p.over {
		p.m.mu.Unlock()
		return call.state, p.err()
	}
	p.last++
	number := p.last
	p.calls[number] = call
	p.m.mu.Unlock()
	b, fds := request(number)
	if err := p.post(what, b, fds); errors.Is(err, errNotSent) {
		p.takeCall(number)
		return call.state, fmt.Errorf("mover %s: %s: %w", p.m.opts.Name, what, err)
	}
	select {
	case <-call.done:
	case <-cancelled:
		p.m.mu.Lock()
		call.until = min(call.until, p.clock.Load()+p.ticks(p.m.opts.Limits.Cancel))
		p.m.mu.Unlock()
		<-call.done
	}
	return call.state, call.err
}

// post sends a message. If it fails, the mover is lost, unless the error is errNotSent.
func (p *process) post(what string, msg []byte, fds []int) error {
	p.m.requests.Add(1)
	err := p.conn.send(msg, fds, time.Now().Add(p.m.opts.Limits.Ping))
	if err != nil && !errors.Is(err, errNotSent) {
		p.disconnect(fmt.Errorf("it does not take a request (%s): %w", what, err))
	}
	return err
}

func (p *process) ticks(d time.Duration) int64 {
	return int64((d + p.m.opts.Limits.Tick - 1) / p.m.opts.Limits.Tick)
}

// openDevice has the process open its device.
func (p *process) openDevice() error {
	o := &p.m.opts
	_, err := p.call("open the device", o.Limits.Start, nil, func(number uint64) ([]byte, []int) {
		return pack(nil, msgSetup, number, &Setup{
			Device: o.Device, GPU: o.GPU, ArenaSize: o.ArenaSize,
		}), []int{p.m.arena}
	})
	return err
}

func (p *process) importPeer(of *peer, im *cudaipc.Import) error {
	_, err := p.call("import of an engine's memory", p.m.opts.Limits.Import, im.Cancelled,
		func(number uint64) ([]byte, []int) {
			of.number = number
			return putImport(number, im)
		})
	return err
}

// closePeer closes a peer, or with allPeers the device. The end of the process counts as the close.
func (p *process) closePeer(peer uint64) error {
	p.closing.Add(1)
	defer p.closing.Add(-1)
	_, err := p.call("close of an engine's memory", p.m.opts.Limits.Close, nil,
		func(number uint64) ([]byte, []int) { return pack(nil, msgClose, number, peer), nil })
	if errors.As(err, new(*cudaipc.LostError)) {
		return nil
	}
	return err
}

// release closes a peer, if need be with the process.
func (p *process) release(peer uint64) {
	if err := p.closePeer(peer); err != nil {
		p.lose(cudaipc.LostCall, fmt.Errorf("close: %w", err))
		<-p.reaped
	}
}

func (p *process) poll(peer uint64, w cudaipc.Wait) (cudaipc.State, error) {
	s, err := p.call("poll", p.m.opts.Limits.Poll, nil,
		func(number uint64) ([]byte, []int) { return pack(nil, msgPoll, number, &pollHead{peer, w}), nil })
	if errors.As(err, new(*cudaipc.LostError)) {
		err = fmt.Errorf("%w: %w", err, cudaipc.ErrPeer)
	}
	return s, err
}

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
	packetDrop             // the message is incomplete: discard it
)

// errWire is wrapped by errors of malformed messages.
var errWire = errors.New("malformed message")

// conn is one end of the socket pair: messages with descriptors. One goroutine receives; any may
// send.
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
		if err := c.packet(kind, msg[:n], fds[:f]); err != nil {
			return c.dropped(err, first)
		}
		msg, fds = msg[n:], fds[f:]
	}
	return nil
}

// errNotSent reports that the other side received nothing of a message; the connection is
// unchanged.
var errNotSent = errors.New("not sent")

// dropped withdraws the sent part of a message whose descriptors the kernel refused to carry.
func (c *conn) dropped(err error, first bool) error {
	if !errors.Is(err, unix.ETOOMANYREFS) && !errors.Is(err, unix.EBADF) {
		return err
	}
	if !first {
		if again := c.packet(packetDrop, nil, nil); again != nil {
			return again
		}
	}
	return fmt.Errorf("%w: %w", errNotSent, err)
}

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
		case packetDrop:
			closeAll(fds)
			msg, fds = msg[:0], nil
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

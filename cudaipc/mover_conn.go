package cudaipc

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Limits of the socket between an agent and its mover. A message is cut into packets, so that it may have any length
// and any number of descriptors up to these.
const (
	maxMoverMessage = 64 << 20 // bytes of one message: a copy of MaxCopyRuns runs and as many blocks has 32 MiB
	moverPacket     = 60 << 10 // bytes of a packet; the kernel takes three and more of them before a writer waits
	moverPacketFDs  = 250      // descriptors of a packet; Linux allows 253
	maxMoverFDs     = MaxRegions + 2
)

// The first byte of each packet.
const (
	packetMore byte = iota // the message goes on
	packetLast             // the message ends here
	packetDrop             // the message ended before its end: forget it
)

// errMoverWire is wrapped by what is wrong with the bytes that came.
var errMoverWire = errors.New("malformed message")

// moverConn is one end of the socket pair: messages with descriptors. One goroutine receives; any may send.
type moverConn struct {
	conn *net.UnixConn

	sending sync.Mutex // over all packets of a message
	out     []byte     // of the sender

	in, oob []byte // of the receiver
}

// newMoverConn takes a descriptor of a SOCK_SEQPACKET socket pair over, also when it fails.
func newMoverConn(fd int) (*moverConn, error) {
	file := os.NewFile(uintptr(fd), "mover")
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, fmt.Errorf("mover's socket: %w", err)
	}
	unixConn, ok := conn.(*net.UnixConn)
	if !ok {
		_ = conn.Close()
		return nil, fmt.Errorf("mover's socket: %T is not a Unix socket", conn)
	}
	return &moverConn{
		conn: unixConn, out: make([]byte, 0, moverPacket+1),
		in: make([]byte, moverPacket+1), oob: make([]byte, unix.CmsgSpace(4*(moverPacketFDs+3))),
	}, nil
}

// send sends one message; the descriptors stay the caller's. It waits at most until deadline for the other side to take
// it. An error leaves the connection usable only if errors.Is(err, errNotSent).
func (c *moverConn) send(msg []byte, fds []int, deadline time.Time) error {
	if len(msg) > maxMoverMessage || len(fds) > maxMoverFDs {
		return fmt.Errorf("%d bytes and %d descriptors, at most %d and %d: %w: %w",
			len(msg), len(fds), maxMoverMessage, maxMoverFDs, errNotSent, ErrRange)
	}
	c.sending.Lock()
	defer c.sending.Unlock()
	_ = c.conn.SetWriteDeadline(deadline) // fails only on a closed connection, which the write tells
	for first := true; first || len(msg) > 0 || len(fds) > 0; first = false {
		n, f := min(len(msg), moverPacket), min(len(fds), moverPacketFDs)
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

// errNotSent says that the other side saw nothing of a message, and the connection is as it was.
var errNotSent = errors.New("not sent")

// dropped takes back what was sent of a message whose descriptors the kernel refused to carry.
func (c *moverConn) dropped(err error, first bool) error {
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

func (c *moverConn) packet(kind byte, part []byte, fds []int) error {
	c.out = append(append(c.out[:0], kind), part...)
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := c.conn.WriteMsgUnix(c.out, oob, nil)
	return err
}

// receive gives the next message, whose bytes are the receiver's until the next call, and its descriptors, which are the
// caller's. They are fewer than were sent if this process can have no more.
func (c *moverConn) receive(msg []byte) ([]byte, []int, error) {
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
		if len(msg)+n > maxMoverMessage || len(fds) > maxMoverFDs || n == 0 {
			closeAll(fds)
			return nil, nil, fmt.Errorf("%d bytes and %d descriptors: %w", len(msg)+n, len(fds), errMoverWire)
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
			return nil, nil, fmt.Errorf("packet of kind %d: %w", c.in[0], errMoverWire)
		}
	}
}

// rights are the descriptors in control data; the kernel closes what it could not give.
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

func (c *moverConn) close() { _ = c.conn.Close() }

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

package ipc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/ipc/peercred"
)

// Times of a session.
const (
	SendTimeout      = 5 * time.Second // for sending one frame; after that the peer counts as dead
	FrameTimeout     = 5 * time.Second // from the first byte of a frame to its last
	HandshakeTimeout = 5 * time.Second
)

// Conn is one session: frames with messages and descriptors over a Unix stream socket, and the
// detection of the peer's death.
//
// Send may be called from any goroutine, Recv from one. The descriptors that Recv returns are the
// caller's; those passed to Send stay the caller's. A received message points into a frame of its
// own, which lives as long as the message.
type Conn struct {
	uc       *net.UnixConn
	peer     peercred.Cred
	pidfd    *os.File // nil: none
	accepted bool     // this is the agent's end
	times    struct{ send, frame time.Duration }

	send struct {
		sync.Mutex
		buf []byte
		err error // why the stream is broken: nothing more can be sent
	}
	recv struct { // used by Recv's goroutine
		err error
		oob []byte
	}
	backlog backlog

	dead struct {
		sync.Mutex
		ch    chan struct{}
		cause error
	}
	died     atomic.Bool // the peer's process died
	watching sync.WaitGroup
	close    sync.Once
}

// NewConn takes over uc. With accepted, at the agent's end, the death of the peer's process ends
// Recv. At a client's end only the end of the socket does, because it proves that no process
// touches the client's memory any more.
func NewConn(uc *net.UnixConn, accepted bool) (*Conn, error) {
	raw, err := uc.SyscallConn()
	if err != nil {
		uc.Close()
		return nil, fmt.Errorf("session: %w", err)
	}
	peer, pidfd, exited, err := peercred.Identify(uc)
	if err != nil {
		uc.Close()
		return nil, fmt.Errorf("session: peer credentials: %w", err)
	}
	c := &Conn{uc: uc, peer: peer, pidfd: peercred.Watchable(pidfd), accepted: accepted}
	c.backlog.raw = raw
	c.times.send, c.times.frame = SendTimeout, FrameTimeout
	c.dead.ch = make(chan struct{})
	c.recv.oob = make([]byte, unix.CmsgSpace(4*MaxRegionsMessage))
	if exited {
		c.peerDied()
	}
	if c.pidfd != nil {
		c.watching.Go(c.watch)
	}
	return c, nil
}

// watch waits for the end of the peer's process, or for Close.
func (c *Conn) watch() {
	raw, err := c.pidfd.SyscallConn()
	if err != nil {
		return
	}
	err = raw.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		return n > 0 && err == nil
	})
	if err == nil {
		c.peerDied()
	}
}

func (c *Conn) peerDied() {
	c.died.Store(true)
	c.end(ErrPeerDied)
	if c.accepted {
		c.uc.CloseRead() // wakes Recv also if a forked child holds the other end
	}
}

// end records the first cause of death.
func (c *Conn) end(cause error) {
	c.dead.Lock()
	defer c.dead.Unlock()
	if c.dead.cause == nil {
		c.dead.cause = cause
		close(c.dead.ch)
	}
}

// Dead returns a channel that is closed when the peer's process died, the socket ended, it broke,
// or Close was called, whichever is first. Recv and Send notice the socket's end; the process's end
// needs neither.
func (c *Conn) Dead() <-chan struct{} { return c.dead.ch }

// Cause returns why Dead is closed, nil before.
func (c *Conn) Cause() error {
	c.dead.Lock()
	defer c.dead.Unlock()
	return c.dead.cause
}

// Peer returns the identity of the process at the other end.
func (c *Conn) Peer() peercred.Cred { return c.peer }

// Hold returns another descriptor of this end of the socket, which the caller owns. Until it is
// closed the peer does not see the socket's end, whatever becomes of c.
func (c *Conn) Hold() (int, error) {
	var fd int
	var err error
	over := c.backlog.raw.Control(func(own uintptr) { fd, err = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 1) })
	if err = errors.Join(err, over); err != nil {
		return 0, fmt.Errorf("session: one more descriptor: %w", err)
	}
	return fd, nil
}

// HungUp reports whether the peer has closed its end, or its sending side. Unlike Dead it needs no
// call of Recv; messages that the peer sent before may still be waiting. It returns false after
// Close.
func (c *Conn) HungUp() (up bool) {
	_ = c.backlog.raw.Control(func(own uintptr) { // fails when c is closed
		fds := []unix.PollFd{{Fd: int32(own), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(fds, 0)
		up = n > 0 && err == nil
	})
	return up
}

// CloseWrite ends the sending side. Recv continues.
func (c *Conn) CloseWrite() error { return c.uc.CloseWrite() }

// Close ends the session: Recv and Send return, and the peer sees the end. It waits for the conn's
// own goroutine.
func (c *Conn) Close() error {
	err := error(nil)
	c.close.Do(func() {
		c.end(ErrClosed)
		err = c.uc.Close()
		c.backlog.set(&c.backlog.end, true)
		if c.pidfd != nil {
			err = errors.Join(err, c.pidfd.Close())
		}
		c.watching.Wait()
	})
	return err
}

// Recv waits for the next message. fds are the descriptors that came with it, close-on-exec, as
// many as it names. Errors are final: a *MalformedError when the peer violates the protocol (an
// ERROR can still be sent), io.EOF at a regular end, ErrPeerDied at the agent's end when the peer's
// process died, ErrStalled when a frame is not complete within FrameTimeout, otherwise the system's
// error. After an error no descriptor is left open.
func (c *Conn) Recv() (msg any, fds []int, err error) { return c.receive(0) }

// receive is Recv with a limit for the arrival of the first byte; an idle of 0 is no limit.
func (c *Conn) receive(idle time.Duration) (msg any, fds []int, err error) {
	if c.recv.err != nil {
		return nil, nil, c.recv.err
	}
	frame, fds, err := c.readFrame(idle)
	if err == nil {
		msg, err = Decode(frame)
	}
	if err == nil && descriptors(msg) != len(fds) {
		err = &MalformedError{messages[frame[1]].name, "descriptors",
			fmt.Sprintf("%d came, the message names %d", len(fds), descriptors(msg))}
	}
	if err == nil {
		return msg, fds, nil
	}
	closeAll(fds)
	var malformed *MalformedError
	if c.died.Load() && c.accepted {
		err = ErrPeerDied
	} else if !errors.As(err, &malformed) {
		c.end(err)
	}
	c.recv.err = err
	c.backlog.set(&c.backlog.end, true)
	return nil, nil, err
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// readFrame reads a length and that many bytes, and never a byte of the next frame, so that
// descriptors belong to this frame. They arrive with the length; the kernel discards those attached
// to a later byte, because no space is passed for them.
func (c *Conn) readFrame(idle time.Duration) (frame []byte, fds []int, err error) {
	var header [lengthBytes]byte
	c.uc.SetReadDeadline(deadline(idle))
	n, fds, err := c.readFirst(header[:])
	if err != nil {
		return nil, fds, err
	}
	c.uc.SetReadDeadline(time.Now().Add(c.times.frame))
	if err := c.readFull(header[n:]); err != nil {
		return nil, fds, err
	}
	size := binary.BigEndian.Uint32(header[:])
	if size == 0 || size > MaxFrame {
		return nil, fds, &MalformedError{"frame", "length",
			fmt.Sprintf("%d, allowed is 1 to %d", size, MaxFrame)}
	}
	frame = make([]byte, size)
	return frame, fds, c.readFull(frame)
}

func deadline(idle time.Duration) time.Time {
	if idle == 0 {
		return time.Time{}
	}
	return time.Now().Add(idle)
}

// readFirst reads the first bytes of a frame and the descriptors that come with them.
func (c *Conn) readFirst(b []byte) (n int, fds []int, err error) {
	if c.died.Load() && c.accepted {
		return 0, nil, ErrPeerDied
	}
	n, oobn, flags, err := c.backlog.read(b, c.recv.oob)
	if oobn > 0 {
		fds = rights(c.recv.oob[:oobn])
	}
	switch {
	case errors.Is(err, io.EOF):
		return 0, fds, io.EOF // without the address that wraps it
	case errors.Is(err, os.ErrDeadlineExceeded):
		return 0, fds, ErrTimeout
	case err == nil && flags&unix.MSG_CTRUNC != 0:
		err = errors.New("session: descriptors were lost: the limit of open files is reached")
	}
	return n, fds, err
}

func rights(oob []byte) (fds []int) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range messages {
		if got, err := unix.ParseUnixRights(&messages[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	return fds
}

// readFull fills b before the current deadline, or a little later: this process may have been
// stopped (SIGSTOP), and the bytes may have come meanwhile.
func (c *Conn) readFull(b []byte) error {
	n, err := io.ReadFull(c.uc, b)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		c.uc.SetReadDeadline(time.Now().Add(c.times.frame / 4))
		_, err = io.ReadFull(c.uc, b[n:])
	}
	switch {
	case errors.Is(err, io.EOF):
		return io.ErrUnexpectedEOF
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ErrStalled
	}
	return err
}

const (
	lengthBytes = 4
	keepBuffer  = 64 << 10 // bytes of a send buffer that are kept from frame to frame
)

// Send sends one message, with the descriptors that it names (only REGIONS names any). A message
// that cannot be encoded is a *MalformedError, and nothing is sent. Any other error means that the
// stream is broken or that the peer did not take the frame within SendTimeout: the session is over,
// though messages that the peer sent before can still be received.
func (c *Conn) Send(msg any, fds ...int) error {
	if want := descriptors(msg); want != len(fds) {
		return &MalformedError{"message", "descriptors",
			fmt.Sprintf("%d, the message names %d", len(fds), want)}
	}
	c.send.Lock()
	defer c.send.Unlock()
	if c.send.err != nil {
		return c.send.err
	}
	frame, err := Encode(append(c.send.buf[:0], 0, 0, 0, 0), msg)
	if err != nil {
		return err
	}
	if c.send.buf = frame[:0]; cap(frame) > keepBuffer {
		c.send.buf = nil
	}
	binary.BigEndian.PutUint32(frame, uint32(len(frame)-lengthBytes))
	if err := c.write(frame, fds); err != nil {
		c.send.err = fmt.Errorf("session send: %w", err)
		c.end(c.send.err)
		return c.send.err
	}
	return nil
}

// descriptors returns how many descriptors a message needs.
func descriptors(msg any) int {
	if r, ok := msg.(*Regions); ok {
		return r.Descriptors()
	}
	return 0
}

// write sends a whole frame, its descriptors with the first byte.
func (c *Conn) write(frame []byte, fds []int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	c.uc.SetWriteDeadline(time.Now().Add(c.times.send))
	for late := false; len(frame) > 0; {
		n, _, err := c.uc.WriteMsgUnix(frame, oob, nil)
		switch {
		case err == nil:
			frame, oob = frame[n:], nil
		case late || !errors.Is(err, os.ErrDeadlineExceeded):
			return err
		default: // as in readFull
			late = true
			c.uc.SetWriteDeadline(time.Now().Add(c.times.send / 4))
		}
	}
	return nil
}

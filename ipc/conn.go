package ipc

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Times of a session.
const (
	SendTimeout      = 5 * time.Second // for one frame to leave; after that the peer counts as dead
	FrameTimeout     = 5 * time.Second // from the first byte of a frame to its last
	HandshakeTimeout = 5 * time.Second
	// stallGrace is given once when a time is up: who was stopped himself (SIGSTOP) finds the bytes there.
	stallGrace = time.Second
)

// Conn is one session: frames with messages and descriptors over a Unix stream socket, and the peer's death.
//
// Send may be called from any goroutine, Recv from one. The descriptors that Recv returns are the caller's;
// those given to Send stay the caller's. Frames are not shared: what a received message points to lives as long
// as the message does.
type Conn struct {
	uc       *net.UnixConn
	peer     Cred
	pidfd    *os.File // nil: none
	fd       int      // of pidfd, -1: none
	accepted bool     // the agent's end
	version  atomic.Uint32
	onClose  func()
	times    struct{ send, frame, grace time.Duration }

	send struct {
		sync.Mutex
		buf []byte
		err error // the stream is broken: nothing more can be sent
	}
	recv struct { // Recv's goroutine
		err error
		oob []byte
	}

	dead struct {
		sync.Mutex
		ch    chan struct{}
		cause error
	}
	died     atomic.Bool // the peer's process
	watching sync.WaitGroup
	close    sync.Once
}

// newConn takes over uc. accepted is the agent's end: there the death of the peer's process ends Recv; at a
// client's end only the end of the socket does, because it is what proves that nobody touches the client's
// memory any more.
func newConn(uc *net.UnixConn, accepted bool) (*Conn, error) {
	peer, pidfd, gone, err := identify(uc)
	if err != nil {
		uc.Close()
		return nil, fmt.Errorf("session: peer credentials: %w", err)
	}
	c := &Conn{uc: uc, peer: peer, fd: pidfd, pidfd: watchable(pidfd), accepted: accepted}
	if c.pidfd == nil {
		c.fd = -1
	}
	c.times.send, c.times.frame, c.times.grace = SendTimeout, FrameTimeout, stallGrace
	c.version.Store(MinVersion)
	c.dead.ch = make(chan struct{})
	c.recv.oob = make([]byte, unix.CmsgSpace(4*MaxRegionsMessage))
	if gone {
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

// end is the first cause of death.
func (c *Conn) end(cause error) {
	c.dead.Lock()
	defer c.dead.Unlock()
	if c.dead.cause == nil {
		c.dead.cause = cause
		close(c.dead.ch)
	}
}

// Dead is closed when the peer's process died, the socket ended, it broke, or Close was called, whichever
// comes first. The socket's end is noticed by Recv or Send, the process's without them.
func (c *Conn) Dead() <-chan struct{} { return c.dead.ch }

// Cause is why Dead is closed, nil before.
func (c *Conn) Cause() error {
	c.dead.Lock()
	defer c.dead.Unlock()
	return c.dead.cause
}

// Peer is who connected, or who listens.
func (c *Conn) Peer() Cred { return c.peer }

// PidFD is a descriptor of the peer's process for polling, -1 if there is none. It belongs to c.
func (c *Conn) PidFD() int { return c.fd }

// Version is what is spoken: MinVersion until the handshake is done.
func (c *Conn) Version() uint32 { return c.version.Load() }

// Hold gives one more descriptor of this end of the socket, the caller's: until it is closed the peer does not see the
// socket's end, whatever becomes of c.
func (c *Conn) Hold() (int, error) {
	raw, err := c.uc.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("session: %w", err)
	}
	var fd int
	again := raw.Control(func(own uintptr) { fd, err = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 1) })
	if err = errors.Join(err, again); err != nil {
		return 0, fmt.Errorf("session: one more descriptor: %w", err)
	}
	return fd, nil
}

// HungUp says whether the peer has closed its end, or says no more. Unlike Dead it needs nobody in
// Recv to notice, and what the peer said before may still be there to be received. False after
// Close.
func (c *Conn) HungUp() (up bool) {
	raw, err := c.uc.SyscallConn()
	if err != nil {
		return false
	}
	_ = raw.Control(func(own uintptr) { // fails when c is closed
		fds := []unix.PollFd{{Fd: int32(own), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(fds, 0)
		up = n > 0 && err == nil
	})
	return up
}

// CloseWrite tells the peer that nothing more comes. Recv goes on.
func (c *Conn) CloseWrite() error { return c.uc.CloseWrite() }

// Close ends the session: Recv and Send return, the peer sees the end. It waits for the conn's own goroutine.
func (c *Conn) Close() error {
	err := error(nil)
	c.close.Do(func() {
		c.end(ErrClosed)
		err = c.uc.Close()
		if c.pidfd != nil {
			err = errors.Join(err, c.pidfd.Close())
		}
		c.watching.Wait()
		if c.onClose != nil {
			c.onClose()
		}
	})
	return err
}

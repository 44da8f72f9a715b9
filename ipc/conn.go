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

	"github.com/kvagent/kvagent/ipc/peercred"
)

// Times of a session.
const (
	SendTimeout      = 5 * time.Second // for sending one frame; after that the peer counts as dead
	FrameTimeout     = 5 * time.Second // from the first byte of a frame to its last
	HandshakeTimeout = 5 * time.Second
	// stallGrace is added once to a deadline that has passed: if this process was stopped
	// (SIGSTOP), the bytes may have arrived meanwhile.
	stallGrace = time.Second
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
	fd       int      // of pidfd, -1: none
	accepted bool     // this is the agent's end
	version  atomic.Uint32
	onClose  func()
	times    struct{ send, frame, grace time.Duration }

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

// newConn takes over uc. With accepted, at the agent's end, the death of the peer's process ends
// Recv. At a client's end only the end of the socket does, because it proves that no process
// touches the client's memory any more.
func newConn(uc *net.UnixConn, accepted bool) (*Conn, error) {
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
	c := &Conn{uc: uc, peer: peer, fd: pidfd, pidfd: peercred.Watchable(pidfd), accepted: accepted}
	c.backlog.raw = raw
	if c.pidfd == nil {
		c.fd = -1
	}
	c.times.send, c.times.frame, c.times.grace = SendTimeout, FrameTimeout, stallGrace
	c.version.Store(MinVersion)
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

// PidFD returns a descriptor of the peer's process for polling, -1 if there is none. It belongs to
// c.
func (c *Conn) PidFD() int { return c.fd }

// Version returns the version in use: MinVersion until the handshake has ended.
func (c *Conn) Version() uint32 { return c.version.Load() }

// Hold returns another descriptor of this end of the socket, which the caller owns. Until it is
// closed the peer does not see the socket's end, whatever becomes of c.
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

// HungUp reports whether the peer has closed its end, or its sending side. Unlike Dead it needs no
// call of Recv; messages that the peer sent before may still be waiting. It returns false after
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

// CloseWrite ends the sending side. Recv continues.
func (c *Conn) CloseWrite() error { return c.uc.CloseWrite() }

// Close ends the session: Recv and Send return, and the peer sees the end. It waits for the conn's
// own goroutine.
func (c *Conn) Close() error {
	err := error(nil)
	c.close.Do(func() {
		c.end(ErrClosed)
		err = c.uc.Close()
		c.backlog.finish()
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

package ipc

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// backlog tells whether messages of the peer wait to be served. Messages of one peer arrive over
// several sockets, so the order in which they were sent is lost where one socket is read later than
// another: a reader of the others asks here what may have been sent before.
type backlog struct {
	raw syscall.RawConn

	mu   sync.Mutex
	busy bool          // a frame was begun to be read, and its message was not served yet
	over chan struct{} // closed when nothing waits any more; nil: nobody asked
	end  bool          // nothing more is served
}

// Served says that the message that Recv returned last was served. The next Recv says so too.
func (c *Conn) Served() { c.backlog.served() }

// Unserved returns nil if everything that the peer had sent before the call was served, or the
// session has ended. Otherwise it returns a channel that is closed when nothing waits any more. It
// may be called from any goroutine.
func (c *Conn) Unserved() <-chan struct{} {
	b := &c.backlog
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.end || !b.busy && b.arrived() == 0 {
		return nil
	}
	if b.over == nil {
		b.over = make(chan struct{})
	}
	return b.over
}

// read reads the first bytes of a frame, and the descriptors that come with them. The frame counts
// as taken before its bytes leave the socket, so none is ever in between.
func (b *backlog) read(p, oob []byte) (n, oobn, flags int, err error) {
	var failed error
	err = b.raw.Read(func(fd uintptr) bool {
		b.take()
		for {
			n, oobn, flags, _, failed = unix.Recvmsg(int(fd), p, oob, unix.MSG_CMSG_CLOEXEC)
			if !errors.Is(failed, unix.EINTR) {
				break
			}
		}
		if errors.Is(failed, unix.EAGAIN) {
			b.served()
			return false
		}
		return true
	})
	switch {
	case err != nil:
		return 0, 0, 0, err
	case failed != nil:
		return 0, 0, 0, os.NewSyscallError("recvmsg", failed)
	case n == 0:
		return 0, oobn, flags, io.EOF
	}
	return n, oobn, flags, nil
}

func (b *backlog) take() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.busy = true
}

func (b *backlog) served() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.busy = false
	if b.over != nil && b.arrived() == 0 {
		b.releaseLocked()
	}
}

// finish ends all waits: the session has ended.
func (b *backlog) finish() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.end = true
	b.releaseLocked()
}

func (b *backlog) releaseLocked() {
	if b.over != nil {
		close(b.over)
		b.over = nil
	}
}

// arrived returns the bytes that wait in the socket; 0 after Close.
func (b *backlog) arrived() (n int) {
	_ = b.raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
	return n
}

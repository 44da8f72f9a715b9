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
	busy bool // a frame was begun to be read, and its message was not served yet
	end  bool // nothing more is served
}

// Served says that the message that Recv returned last was served. The next Recv says so too.
func (c *Conn) Served() { c.backlog.set(&c.backlog.busy, false) }

// Unserved reports whether something that the peer had sent before the call was not served. It
// returns false after the session has ended. It may be called from any goroutine.
func (c *Conn) Unserved() bool {
	b := &c.backlog
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.end && (b.busy || b.arrived() > 0)
}

// read reads the first bytes of a frame, and the descriptors that come with them. The frame counts
// as taken before its bytes leave the socket, so none is ever in between.
func (b *backlog) read(p, oob []byte) (n, oobn, flags int, err error) {
	var failed error
	err = b.raw.Read(func(fd uintptr) bool {
		b.set(&b.busy, true)
		for {
			n, oobn, flags, _, failed = unix.Recvmsg(int(fd), p, oob, unix.MSG_CMSG_CLOEXEC)
			if !errors.Is(failed, unix.EINTR) {
				break
			}
		}
		if errors.Is(failed, unix.EAGAIN) {
			b.set(&b.busy, false)
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

func (b *backlog) set(flag *bool, on bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	*flag = on
}

// arrived returns the bytes that wait in the socket; 0 after Close.
func (b *backlog) arrived() (n int) {
	_ = b.raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
	return n
}

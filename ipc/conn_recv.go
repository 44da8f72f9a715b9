package ipc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const firstRead = 64 << 10 // bytes of a frame that are allocated before they have arrived

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
		msg, err = Decode(c.Version(), frame)
	}
	if err == nil && descriptors(msg) != len(fds) {
		err = &MalformedError{ReasonDescriptors, messageNames[frame[1]], "descriptors",
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
	c.backlog.finish()
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
	graced := false
	if err := c.readFull(header[n:], &graced); err != nil {
		return nil, fds, err
	}
	size := binary.BigEndian.Uint32(header[:])
	if size == 0 || size > MaxFrame {
		return nil, fds, &MalformedError{ReasonTooLarge, "frame", "length",
			fmt.Sprintf("%d, allowed is 1 to %d", size, MaxFrame)}
	}
	frame = make([]byte, min(size, firstRead))
	if err := c.readFull(frame, &graced); err != nil || size == uint32(len(frame)) {
		return frame, fds, err
	}
	whole := make([]byte, size)
	return whole, fds, c.readFull(whole[copy(whole, frame):], &graced)
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

// readFull fills b before the current deadline, which stallGrace extends once.
func (c *Conn) readFull(b []byte, graced *bool) error {
	for len(b) > 0 {
		n, err := c.uc.Read(b)
		b = b[n:]
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			return io.ErrUnexpectedEOF
		case errors.Is(err, os.ErrDeadlineExceeded) && !*graced:
			*graced = true
			c.uc.SetReadDeadline(time.Now().Add(c.times.grace))
		case errors.Is(err, os.ErrDeadlineExceeded):
			return ErrStalled
		default:
			return err
		}
	}
	return nil
}

package ipc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

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
		return &MalformedError{ReasonDescriptors, "message", "descriptors",
			fmt.Sprintf("%d, the message names %d", len(fds), want)}
	}
	c.send.Lock()
	defer c.send.Unlock()
	if c.send.err != nil {
		return c.send.err
	}
	frame, err := Encode(append(c.send.buf[:0], 0, 0, 0, 0), c.Version(), msg)
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
	graced := false
	for len(frame) > 0 {
		n, _, err := c.uc.WriteMsgUnix(frame, oob, nil)
		if n > 0 {
			frame, oob = frame[n:], nil
		}
		switch {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded) && !graced:
			graced = true
			c.uc.SetWriteDeadline(time.Now().Add(c.times.grace))
		default:
			return err
		}
	}
	return nil
}

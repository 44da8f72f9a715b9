package ipc

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Limits of what a peer may send. A message beyond the limits of a look-up is answered as
// malformed; beyond these its connection ends.
const (
	maxZMQFrame      = 4 * MaxLookupBytes   // bytes of a frame
	maxMessageBytes  = 16 * MaxLookupBytes  // of a message, kept or not
	maxMessageFrames = 16 * MaxLookupFrames // of a message, kept or not
	zmtpBuffer       = 16 << 10             // bytes read at once; longer frames are read directly into the message
	// keepHead is how many bytes are kept of the frame that made a message too large: they identify
	// its form.
	keepHead = 16
)

// zmtpReader reads the messages of one peer. It discards what is beyond the limits of a look-up.
type zmtpReader struct {
	src  io.Reader
	buf  []byte // of zmtpBuffer
	r, w int    // the unread part of buf

	// The message read last, without the empty frame before the request, as REQ and DEALER send it.
	enveloped bool
	message   Frames // its frames; of one that is too large the beginning
	frames    int    // how many it had, kept or not
	bytes     int64
	over      bool

	// grow is called before a message's memory grows beyond keepReceived.
	grow func() error
}

// fill reads more into buf until it has n bytes; n is at most zmtpBuffer.
func (z *zmtpReader) fill(n int) error {
	if z.w-z.r >= n {
		return nil
	}
	copy(z.buf, z.buf[z.r:z.w])
	z.r, z.w = 0, z.w-z.r
	for z.w < n {
		got, err := z.src.Read(z.buf[z.w:])
		z.w += got
		if err != nil && z.w < n {
			return err
		}
	}
	return nil
}

// head reads the flags and the length of a frame.
func (z *zmtpReader) head() (flags byte, size uint64, err error) {
	if err = z.fill(2); err != nil {
		return 0, 0, err
	}
	flags = z.buf[z.r]
	if flags&^(zmtpMore|zmtpLong|zmtpCommand) != 0 || flags&zmtpCommand != 0 && flags&zmtpMore != 0 {
		return 0, 0, fmt.Errorf("flags %#x: %w", flags, errZMTP)
	}
	if flags&zmtpLong == 0 {
		size = uint64(z.buf[z.r+1])
		z.r += 2
		return flags, size, nil
	}
	if err = z.fill(9); err != nil {
		return 0, 0, err
	}
	size = binary.BigEndian.Uint64(z.buf[z.r+1:])
	z.r += 9
	return flags, size, nil
}

// next reads a message.
func (z *zmtpReader) next() error {
	z.message.Reset()
	z.enveloped, z.frames, z.bytes, z.over = false, 0, 0, false
	for {
		flags, size, err := z.head()
		if err != nil {
			return err
		}
		if flags&zmtpCommand != 0 {
			return fmt.Errorf("a command of %d bytes after the handshake: %w", size, errZMTP)
		}
		if err := z.frame(size); err != nil {
			return err
		}
		if flags&zmtpMore == 0 {
			return nil
		}
	}
}

// frame reads the body of a frame, and keeps it while the message is within the limits of a
// look-up.
func (z *zmtpReader) frame(size uint64) error {
	if size > maxZMQFrame {
		return fmt.Errorf("a frame of %d bytes, allowed is %d: %w", size, maxZMQFrame, errZMTP)
	}
	if size == 0 && z.frames == 0 && !z.enveloped {
		z.enveloped = true
		return nil
	}
	z.frames++
	z.bytes += int64(size)
	if z.frames > maxMessageFrames || z.bytes > maxMessageBytes {
		return fmt.Errorf("a message of more than %d frames or %d bytes: %w", maxMessageFrames, maxMessageBytes,
			errZMTP)
	}
	n := int(size)
	if z.over {
		return z.skip(n)
	}
	if len(z.message.Ends) >= MaxLookupFrames || len(z.message.Buf)+n > MaxLookupBytes {
		z.over = true
		if err := z.keep(min(n, keepHead)); err != nil {
			return err
		}
		return z.skip(n - min(n, keepHead))
	}
	return z.keep(n)
}

// keep appends a frame of n bytes to the message.
func (z *zmtpReader) keep(n int) error {
	m := &z.message
	from := len(m.Buf)
	if from+n > cap(m.Buf) {
		if err := z.room(n); err != nil {
			return err
		}
	}
	m.Buf = m.Buf[:from+n]
	got := copy(m.Buf[from:], z.buf[z.r:z.w])
	z.r += got
	if got < n {
		if _, err := io.ReadFull(z.src, m.Buf[from+got:]); err != nil {
			return err
		}
	}
	m.end()
	return nil
}

// room makes room for n more bytes in the message.
func (z *zmtpReader) room(n int) error {
	m := &z.message
	want := max(2*cap(m.Buf), len(m.Buf)+n, 4096)
	if want > keepReceived {
		if err := z.grow(); err != nil {
			return err
		}
	}
	m.Buf = append(make([]byte, 0, want), m.Buf...)
	return nil
}

func (z *zmtpReader) skip(n int) error {
	for n > 0 {
		if z.r == z.w {
			if err := z.fill(1); err != nil {
				return err
			}
		}
		got := min(n, z.w-z.r)
		z.r += got
		n -= got
	}
	return nil
}

// trim releases the memory of a large message, and reports whether there was one.
func (z *zmtpReader) trim() bool {
	if cap(z.message.Buf) <= keepReceived && cap(z.message.Ends) <= keepEnds {
		return false
	}
	large := cap(z.message.Buf) > keepReceived
	z.message = Frames{}
	return large
}

// ZMTP 3.0, as much of it as a ROUTER speaks with REQ, DEALER and ROUTER peers:
// https://rfc.zeromq.org/spec/23.
//
//	greeting   ff 0000000000000001 7f | 3 0 | "NULL" in 20 bytes | 0 | 31 zeros
//	frame      flags, length in 1 byte or, LONG, 8 of big endian, body
//	READY      a COMMAND frame: 5 "READY", then properties: length, name, length in 4 bytes, value

// Flags of a frame.
const (
	zmtpMore    = 1
	zmtpLong    = 2
	zmtpCommand = 4
)

const (
	greetingBytes   = 64
	greetingVersion = 10 // offset of the major version
	greetingName    = 12 // offset of the mechanism, 20 bytes
	greetingNameLen = 20
	maxZMTPCommand  = 1024 // bytes of a command
)

// errZMTP is wrapped by the error that ends a connection whose peer violates ZMTP.
var errZMTP = errors.New("not ZMTP 3 as a REQ or DEALER speaks it")

var zmtpGreeting = func() (b [greetingBytes]byte) {
	b[0], b[8], b[9] = 0xff, 1, 0x7f
	b[greetingVersion] = 3
	copy(b[greetingName:], "NULL")
	return b
}()

// zmtpReady is the command with which a ROUTER ends the handshake.
var zmtpReady = readyCommand("ROUTER")

func readyCommand(socketType string) []byte {
	const name = "Socket-Type"
	body := append([]byte("\x05READY"), byte(len(name)))
	body = append(body, name...)
	body = binary.BigEndian.AppendUint32(body, uint32(len(socketType)))
	body = append(body, socketType...)
	return append([]byte{zmtpCommand, byte(len(body))}, body...)
}

// checkGreeting checks that a peer's greeting is ZMTP 3 without security.
func checkGreeting(b []byte) error {
	switch {
	case b[0] != 0xff || b[9]&1 == 0:
		return fmt.Errorf("signature %x: %w", b[:10], errZMTP)
	case b[greetingVersion] < 3:
		return fmt.Errorf("version %d, allowed is 3: %w", b[greetingVersion], errZMTP)
	case string(bytes.TrimRight(b[greetingName:greetingName+greetingNameLen], "\x00")) != "NULL":
		return fmt.Errorf("mechanism %q, allowed is NULL: %w", b[greetingName:greetingName+greetingNameLen], errZMTP)
	}
	return nil
}

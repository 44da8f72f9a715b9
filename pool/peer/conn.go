package peer

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool/peer/seal"
)

// conn is a connection of which both sides are authenticated. One goroutine reads; any may write.
type conn struct {
	raw     net.Conn
	direct  bool          // the kernel reads and writes slots: no TLS between
	timeout time.Duration // silence after which the other side counts as dead
	beat    time.Duration // how often this side writes at least

	in      seal.Seal
	due     time.Time // when the other side must have sent what was asked of it; zero: nothing was
	head    [headerBytes]byte
	mac     [macBytes]byte // of the part of a block at hand
	payload []byte
	bounce  []byte // for slots, where TLS is between

	writing sync.Mutex
	out     seal.Seal
	frame   []byte    // scratch
	copied  []byte    // for slots, where TLS is between or a page faulted
	until   time.Time // when the frame that is being written must have been taken; zero: writePart by writePart
	wrote   bool      // since the last beat
}

// errSilent is a peer from which nothing came, or that took nothing, for its time.
var errSilent = errors.New("silent")

// errSlow is a peer that sends or takes something all the time, and too little.
var errSlow = errors.New("too slow")

// next reads the header of the next frame, and verifies its tag. The rest must be read before the
// next call.
func (c *conn) next() (header, error) {
	if err := c.readFull(c.head[:]); err != nil {
		return header{}, err
	}
	h, err := parseHeader(c.head[:])
	if err != nil {
		return header{}, err
	}
	return h, c.verify(c.head[:macAt], c.head[macAt:])
}

// rest reads the next n bytes of the frame at hand, which are a part and its tag, and verifies
// them. The part is valid until the next call.
func (c *conn) rest(n int) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	if n <= macBytes {
		return nil, malformed("%d bytes after a header, allowed: none, or more than a tag", n)
	}
	if cap(c.payload) < n {
		c.payload = make([]byte, n)
	}
	b := c.payload[:n]
	if err := c.readFull(b); err != nil {
		return nil, err
	}
	part := b[:n-macBytes]
	return part, c.verify(part, b[n-macBytes:])
}

// verify verifies the next part.
func (c *conn) verify(part, tag []byte) error {
	if err := c.in.Verify(part, tag); err != nil {
		return malformed("%w", err)
	}
	return nil
}

// skip reads the rest of the frame at hand, n bytes, and uses nothing of it.
func (c *conn) skip(n int) error {
	var some [4 << 10]byte
	if n > 0 {
		c.in.Skip(1)
	}
	for n > 0 {
		p := some[:min(n, len(some))]
		if err := c.readFull(p); err != nil {
			return err
		}
		n -= len(p)
	}
	return nil
}

// readFull fills p. It fails when nothing came for the timeout, or not all in the time of its size.
func (c *conn) readFull(p []byte) error {
	until := time.Now().Add(c.timeout + atLeastRate(len(p)))
	if !c.due.IsZero() && c.due.Before(until) {
		until = c.due
	}
	for len(p) > 0 {
		n, err := c.read(p, until)
		if err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// leastRate is how fast the other side must send and take at least, bytes per second: the timeout
// says when it is dead, and this when it is too slow to be worth the slots, pins and goroutines.
const leastRate = 1 << 20

// atLeastRate returns how long so many bytes may take.
func atLeastRate[T int | int64](bytes T) time.Duration {
	return time.Duration(bytes) * time.Second / leastRate
}

// read reads what there is, at least one byte, for the timeout at most, and until a time; zero:
// none.
func (c *conn) read(p []byte, until time.Time) (int, error) {
	over := func() bool { return !until.IsZero() && !time.Now().Before(until) }
	n, err := 0, os.ErrDeadlineExceeded
	silence := time.Now().Add(c.timeout)
	if !over() {
		end := silence
		if !until.IsZero() && until.Before(end) {
			end = until
		}
		if n, err = c.readUntil(p, end); n == 0 && errors.Is(err, os.ErrDeadlineExceeded) {
			// This process may have been stopped, and the bytes have been there for long.
			n, err = c.readUntil(p, time.Now().Add(c.timeout/8))
		}
	}
	switch {
	case n > 0:
		return n, nil
	case !errors.Is(err, os.ErrDeadlineExceeded):
		return 0, err
	case over() && time.Now().Before(silence):
		return 0, fmt.Errorf("%w: less than %d bytes per second came", errSlow, leastRate)
	}
	return 0, fmt.Errorf("%w for %v", errSilent, c.timeout)
}

func (c *conn) readUntil(p []byte, end time.Time) (int, error) {
	_ = c.raw.SetReadDeadline(end) // fails if the connection has ended, and Read says how
	return c.raw.Read(p)
}

// send writes a frame.
func (c *conn) send(k kind, id uint32, payload []byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.seal(k, id, payload, 0)
	return c.writeAll(c.frame)
}

// seal puts a frame into c.frame, with tags. After it, the caller writes so many more bytes of the
// same frame: parts with their tags.
func (c *conn) seal(k kind, id uint32, payload []byte, after int64) {
	h := header{kind: k, id: id, length: uint32(after)}
	if len(payload) > 0 {
		h.length += uint32(len(payload) + macBytes)
	}
	c.frame = append(c.frame[:0], make([]byte, headerBytes)...)
	h.put(c.frame)
	c.out.Tag(c.frame[:macAt], c.frame[:macAt])
	if len(payload) > 0 {
		c.frame = append(c.frame, payload...)
		c.frame = c.out.Tag(c.frame, payload)
	}
	c.wrote = true
}

// writeAll writes b, which the other side must take within the timeout for each MiB, and until
// c.until.
func (c *conn) writeAll(b []byte) error {
	for part := range slices.Chunk(b, writePart) {
		if err := c.limitWrite(); err != nil {
			return err
		}
		if _, err := c.raw.Write(part); err != nil {
			return writeError(err, c.timeout)
		}
	}
	return nil
}

// limitWrite sets the time of the next write.
func (c *conn) limitWrite() error {
	until := time.Now().Add(c.timeout)
	if !c.until.IsZero() && c.until.Before(until) {
		until = c.until
	}
	return c.raw.SetWriteDeadline(until)
}

// cut ends the connection at once: TLS would wait to say so to a peer that takes nothing.
func (c *conn) cut() {
	if t, is := c.raw.(*tls.Conn); is {
		_ = t.NetConn().Close()
	}
	_ = c.raw.Close()
}

// writePart is what one write may have, bytes.
const writePart = 1 << 20

func writeError(err error, within time.Duration) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("%w: it took too little for %v", errSilent, within)
	}
	return err
}

// heartbeats writes a PING when nothing else was written for a while, until ended is closed. The
// other side loses the connection if it takes nothing, which ends the reader; if it has ended, the
// reader sees that itself.
func (c *conn) heartbeats(ended <-chan struct{}) {
	tick := time.NewTicker(c.beat)
	defer tick.Stop()
	for {
		select {
		case <-ended:
			return
		case <-tick.C:
		}
		if !c.writing.TryLock() {
			continue // something is being written
		}
		quiet := !c.wrote
		c.wrote = false
		c.writing.Unlock()
		if !quiet {
			continue
		}
		if err := c.send(kindPing, 0, nil); err != nil {
			if errors.Is(err, errSilent) {
				_ = c.raw.Close()
			}
			return
		}
	}
}

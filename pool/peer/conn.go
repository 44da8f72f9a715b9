package peer

import (
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"net"
	"os"
	"sync"
	"time"
)

// conn is a connection of which both sides are authenticated. One goroutine reads; any may write.
type conn struct {
	raw     net.Conn
	version uint16
	direct  bool          // the kernel reads and writes slots: no TLS between
	timeout time.Duration // silence after which the other side counts as dead
	beat    time.Duration // how often this side writes at least

	in      seal
	head    [headerBytes]byte
	payload []byte
	bounce  []byte // for slots, where TLS is between

	writing sync.Mutex
	out     seal
	frame   []byte // scratch
	copied  []byte // for slots, where TLS is between or a page faulted
	wrote   bool   // since the last beat
}

// seal makes the MACs of one direction. It counts frames, so none can be left out or repeated.
type seal struct {
	mac   hash.Hash
	frame uint64
}

func newSeal(key []byte) seal { return seal{mac: hmac.New(sha256.New, key)} }

// sum returns the MAC of the next frame: of its number, its header, and its payload; of a BLOCKS,
// of the table.
func (s *seal) sum(head, payload []byte) (mac [macBytes]byte) {
	var number [8]byte
	le.PutUint64(number[:], s.frame)
	s.frame++
	s.mac.Reset()
	s.mac.Write(number[:])
	s.mac.Write(head[:macAt])
	s.mac.Write(payload)
	var full [sha256.Size]byte
	copy(mac[:], s.mac.Sum(full[:0]))
	return mac
}

// errSilent is a peer from which nothing came, or that took nothing, for its time.
var errSilent = errors.New("silent")

// next reads the header of the next frame. The rest must be read before the next call.
func (c *conn) next() (header, error) {
	if err := c.readFull(c.head[:]); err != nil {
		return header{}, err
	}
	return parseHeader(c.head[:])
}

// rest reads the first n bytes of the payload of the frame at hand, and verifies its MAC with them.
// They are valid until the next call.
func (c *conn) rest(n int) ([]byte, error) {
	if cap(c.payload) < n {
		c.payload = make([]byte, n)
	}
	p := c.payload[:n]
	if err := c.readFull(p); err != nil {
		return nil, err
	}
	want := c.in.sum(c.head[:], p)
	if !hmac.Equal(want[:], c.head[macAt:]) {
		return nil, malformed("a MAC that does not match")
	}
	return p, nil
}

// readFull fills p. It fails when nothing came for the timeout.
func (c *conn) readFull(p []byte) error {
	for len(p) > 0 {
		n, err := c.read(p)
		if err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// read reads what there is, at least one byte.
func (c *conn) read(p []byte) (int, error) {
	n, err := c.readWithin(p, c.timeout)
	if n == 0 && errors.Is(err, os.ErrDeadlineExceeded) {
		// This process may have been stopped, and the bytes have been there for long.
		n, err = c.readWithin(p, c.timeout/8)
	}
	if n > 0 {
		return n, nil
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return 0, fmt.Errorf("%w for %v", errSilent, c.timeout)
	}
	return 0, err
}

func (c *conn) readWithin(p []byte, d time.Duration) (int, error) {
	_ = c.raw.SetReadDeadline(time.Now().Add(d)) // fails if the connection has ended, and Read says how
	return c.raw.Read(p)
}

// send writes a frame.
func (c *conn) send(k kind, id uint32, payload []byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.seal(k, id, uint32(len(payload)), payload)
	return c.writeAll(c.frame)
}

// seal puts a frame without what its MAC does not cover into c.frame.
func (c *conn) seal(k kind, id, length uint32, payload []byte) {
	h := header{kind: k, id: id, length: length}
	c.frame = append(c.frame[:0], make([]byte, headerBytes)...)
	h.put(c.frame)
	mac := c.out.sum(c.frame, payload)
	copy(c.frame[macAt:], mac[:])
	c.frame = append(c.frame, payload...)
	c.wrote = true
}

// writeAll writes b, which the other side must take within the timeout for each MiB.
func (c *conn) writeAll(b []byte) error {
	for len(b) > 0 {
		n := min(len(b), writePart)
		if err := c.raw.SetWriteDeadline(time.Now().Add(c.timeout)); err != nil {
			return err
		}
		if _, err := c.raw.Write(b[:n]); err != nil {
			return writeError(err, c.timeout)
		}
		b = b[n:]
	}
	return nil
}

// writePart is what one write may have, bytes.
const writePart = 1 << 20

func writeError(err error, within time.Duration) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("%w: it took nothing for %v", errSilent, within)
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

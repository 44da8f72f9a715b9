package ipc

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/connlimit"
)

// lookupPeer is one connection of a look-up socket. Its goroutine owns it.
type lookupPeer struct {
	s     *LookupServer
	nc    *net.UnixConn
	place *connlimit.Place

	in      zmtpReader
	begun   bool // part of a message or of the handshake has arrived, and the rest has a deadline
	timed   bool // the connection has a deadline for it
	large   bool // it holds a place in s.large
	parser  Parser
	request LookupRequest
	out     []byte
}

func newLookupPeer(s *LookupServer, nc *net.UnixConn) *lookupPeer {
	p := &lookupPeer{s: s, nc: nc}
	p.in = zmtpReader{src: p, buf: make([]byte, zmtpBuffer), grow: p.grow}
	return p
}

// run serves the connection until it, or the server, ends.
func (p *lookupPeer) run() {
	defer p.s.leave(p)
	defer p.nc.Close()
	defer p.settle()
	err := p.greet()
	if err == nil {
		p.place.Set(connlimit.Held) // a client keeps its connection between requests
	}
	for err == nil {
		p.begun = p.in.r < p.in.w
		if err = p.next(); err == nil {
			err = p.answer()
		}
		p.settle()
	}
	if errors.Is(err, errZMTP) || errors.As(err, new(*MalformedError)) ||
		errors.Is(err, os.ErrDeadlineExceeded) && !p.s.ending() {
		p.s.o.Counts.Dropped.Add(1)
		p.s.malformed(err)
	}
}

// next reads a message. One that makes its reader panic ends the connection.
func (p *lookupPeer) next() (err error) {
	defer Guard(&err)
	return p.in.next()
}

// settle ends a message: it clears the deadline and releases large memory.
func (p *lookupPeer) settle() {
	p.begun = false
	if p.timed {
		p.timed = false
		_ = p.nc.SetReadDeadline(time.Time{}) // nothing is read from a closed connection
		if p.s.ending() {
			p.hurry()
		}
	}
	p.in.trim()
	if p.large {
		p.large = false
		<-p.s.large
	}
}

// hurry stops reading, and limits the answers that are being written to lookupLinger.
func (p *lookupPeer) hurry() {
	now := time.Now()
	_ = p.nc.SetReadDeadline(now)
	_ = p.nc.SetWriteDeadline(now.Add(lookupLinger))
}

// Read reads for in. A peer may be silent for ever, but a message must be complete within
// FrameTimeout.
func (p *lookupPeer) Read(b []byte) (int, error) {
	if p.begun && !p.timed {
		p.timed = true
		_ = p.nc.SetReadDeadline(time.Now().Add(FrameTimeout))
		if p.s.ending() {
			p.hurry()
		}
	}
	n, err := p.nc.Read(b)
	p.begun = true
	return n, err
}

// grow waits for a place among the large messages.
func (p *lookupPeer) grow() error {
	if p.large {
		return nil
	}
	timer := time.NewTimer(FrameTimeout)
	defer timer.Stop()
	select {
	case p.s.large <- struct{}{}:
		p.large = true
		return nil
	case <-timer.C:
		return fmt.Errorf("no place for a large message within %v", FrameTimeout)
	case <-p.s.closing:
		return net.ErrClosed
	}
}

// greet performs ZMTP's handshake: both sides send a greeting, then READY.
func (p *lookupPeer) greet() error {
	p.begun = true
	defer p.settle()
	if err := p.send(append(zmtpGreeting[:], zmtpReady...)); err != nil {
		return err
	}
	if err := p.in.fill(greetingBytes); err != nil {
		return err
	}
	if err := checkGreeting(p.in.buf[p.in.r : p.in.r+greetingBytes]); err != nil {
		return err
	}
	p.in.r += greetingBytes
	flags, size, err := p.in.head()
	if err != nil {
		return err
	}
	if flags&zmtpCommand == 0 || size > maxZMTPCommand {
		return fmt.Errorf("flags %#x, %d bytes instead of READY: %w", flags, size, errZMTP)
	}
	if err := p.in.fill(int(size)); err != nil {
		return err
	}
	body := p.in.buf[p.in.r : p.in.r+int(size)]
	p.in.r += int(size)
	if !bytes.HasPrefix(body, []byte("\x05READY")) { // whatever type of socket it is of
		return fmt.Errorf("%d bytes of a command that is not READY: %w", len(body), errZMTP)
	}
	return nil
}

// answer replies to the message that was read, in its envelope.
func (p *lookupPeer) answer() error {
	bad := p.parse()
	a := LookupReply{Status: LookupMalformed, Boot: p.s.o.Boot}
	if bad == nil {
		a = p.s.handle(&p.request)
	} else {
		p.s.malformed(bad)
	}
	p.out = p.out[:0]
	if p.in.enveloped {
		p.out = append(p.out, zmtpMore, 0)
	}
	p.out = append(p.out, 0, 0)
	head := len(p.out)
	p.out = AppendReply(p.out, &p.request, a)
	p.out[head-1] = byte(len(p.out) - head) // at most 64
	err := p.send(p.out)
	if err != nil {
		p.s.o.Counts.Unsent.Add(1)
		p.s.o.OnUnsent(a)
	}
	if bad == nil {
		p.s.o.OnAnswered(&p.request, &a)
	}
	return err
}

// parse reads a message as a request.
func (p *lookupPeer) parse() (err error) {
	defer Guard(&err)
	f := &p.in.message
	if p.in.enveloped && !p.in.over {
		return p.parser.Parse(f, &p.request)
	}
	p.request = LookupRequest{}
	if !p.in.enveloped {
		return &MalformedError{"look-up", "", "no empty frame before the request, as REQ sends it"}
	}
	head := f.At(0)
	p.request.Form = detectForm(p.in.frames, head, len(head))
	return &MalformedError{"look-up", "", fmt.Sprintf("%d frames, %d bytes, allowed is 1 to %d and %d",
		p.in.frames, p.in.bytes, MaxLookupFrames, MaxLookupBytes)}
}

// send writes, and waits for a peer that does not read, at most FrameTimeout. Nothing more is read
// from the peer meanwhile.
func (p *lookupPeer) send(b []byte) error {
	_ = p.nc.SetWriteDeadline(time.Now().Add(FrameTimeout))
	if p.s.ending() {
		p.hurry()
	}
	_, err := p.nc.Write(b)
	return err
}

var _ io.Reader = (*lookupPeer)(nil)

// LookupCounts counts what went wrong at some look-up sockets.
type LookupCounts struct {
	Unsent    atomic.Uint64 // answers to peers that had disconnected or did not read
	Dropped   atomic.Uint64 // connections closed: no ZMTP, beyond one of its limits, or too many
	Waited    atomic.Uint64 // times that a connection had to wait for a descriptor
	Malformed atomic.Uint64 // requests
}

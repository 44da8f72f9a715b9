package ipc

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/connlimit"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// zmtpFrame is a frame as it goes over the wire.
func zmtpFrame(flags byte, body []byte) []byte {
	if len(body) > 255 {
		return append(binary.BigEndian.AppendUint64([]byte{flags | zmtpLong}, uint64(len(body))), body...)
	}
	return append([]byte{flags, byte(len(body))}, body...)
}

// dialRaw is a peer that has shaken hands and says what it likes.
func dialRaw(t *testing.T, path string) net.Conn {
	t.Helper()
	nc, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(4 * FrameTimeout))
	if _, err := nc.Write(append(zmtpGreeting[:], readyCommand("REQ")...)); err != nil {
		t.Fatal(err)
	}
	hello := make([]byte, greetingBytes+len(zmtpReady))
	if _, err := io.ReadFull(nc, hello); err != nil || !bytes.Equal(hello, append(zmtpGreeting[:], zmtpReady...)) {
		t.Fatalf("handshake: %x, %v", hello, err)
	}
	return nc
}

// closed waits for the other end to close, and gives what came before.
func closed(t *testing.T, nc net.Conn) []byte {
	t.Helper()
	got, err := io.ReadAll(nc)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal("the connection was not closed")
	}
	return got
}

// A stream that is not ZMTP, too large, or endless costs its own connection, and no other.
func TestLookupHostilePeers(t *testing.T) {
	s := serveLookups(t, socketDir(t), "lookup", echoHandler)
	l := dialLookup(t, s.Path())
	defer l.Close()
	hash := run(0, 32)
	for name, attack := range map[string]func(net.Conn){
		"a message that never ends": func(nc net.Conn) {
			frames := bytes.Repeat(zmtpFrame(zmtpMore, hash), 1000)
			for range 2 * maxMessageFrames / 1000 {
				if _, err := nc.Write(frames); err != nil {
					return
				}
			}
		},
		"a message of endless empty frames": func(nc net.Conn) {
			frames := bytes.Repeat([]byte{zmtpMore, 0}, 10000)
			for range 2 * maxMessageFrames / 10000 {
				if _, err := nc.Write(frames); err != nil {
					return
				}
			}
		},
		"a message that stops":  func(nc net.Conn) { nc.Write(zmtpFrame(zmtpMore, hash)) },
		"half a frame":          func(nc net.Conn) { nc.Write(zmtpFrame(0, hash)[:10]) },
		"a frame of 2^63 bytes": func(nc net.Conn) { nc.Write([]byte{zmtpLong, 128, 0, 0, 0, 0, 0, 0, 0}) },
		"a frame above the limit": func(nc net.Conn) {
			nc.Write(append([]byte{zmtpLong}, binary.BigEndian.AppendUint64(nil, maxZMQFrame+1)...))
		},
		"reserved flags":      func(nc net.Conn) { nc.Write([]byte{8, 0}) },
		"a command with more": func(nc net.Conn) { nc.Write([]byte{zmtpCommand | zmtpMore, 0}) },
		"a command":           func(nc net.Conn) { nc.Write(zmtpFrame(zmtpCommand, []byte("\x04PING\x00\x0ahere"))) },
	} {
		t.Run(name, func(t *testing.T) {
			before := s.Counters().Dropped
			nc := dialRaw(t, s.Path())
			attack(nc)
			if _, err := l.Ask(&LookupRequest{}, testTimeout); err != nil {
				t.Errorf("another client meanwhile: %v", err)
			}
			closed(t, nc)
			if after := s.Counters().Dropped; after != before+1 {
				t.Errorf("%d connections counted as dropped, want 1", after-before)
			}
		})
	}
}

func TestLookupHandshakeRefused(t *testing.T) {
	s := serveLookups(t, socketDir(t), "lookup", echoHandler)
	curve, old := zmtpGreeting, zmtpGreeting
	copy(curve[greetingName:], "CURVE")
	old[greetingVersion] = 2
	for name, hello := range map[string][]byte{
		"not ZMTP": []byte(
			"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: somebody else\r\nAccept: */*\r\n\r\n"),
		"curve":     curve[:],
		"version 2": old[:],
		"no READY":  append(zmtpGreeting[:], zmtpFrame(0, []byte("READY"))...),
		"ERROR":     append(zmtpGreeting[:], zmtpFrame(zmtpCommand, []byte("\x05ERROR\x00"))...),
	} {
		nc, err := net.Dial("unix", s.Path())
		if err != nil {
			t.Fatal(err)
		}
		nc.SetDeadline(time.Now().Add(testTimeout))
		nc.Write(hello)
		if got := closed(t, nc); len(got) > greetingBytes+len(zmtpReady) {
			t.Errorf("%s: answered %x", name, got)
		}
		nc.Close()
	}
	if n := s.Counters().Dropped; n != 5 {
		t.Errorf("%d dropped, want 5", n)
	}
}

// Requests that were sent before Close are answered; peers that are silent do not delay it.
func TestLookupCloseAnswers(t *testing.T) {
	asked, goOn := make(chan struct{}), make(chan struct{})
	s := serveLookups(t, socketDir(t), "lookup", func(r *LookupRequest, _ time.Time) LookupReply {
		close(asked)
		<-goOn
		return LookupReply{Tokens: 7}
	})
	silent, nc := dialRaw(t, s.Path()), dialRaw(t, s.Path())
	own := encodeRequest(&LookupRequest{Form: FormOwn})[0]
	nc.Write(append([]byte{zmtpMore, 0}, zmtpFrame(0, own)...))
	<-asked
	ended := make(chan struct{})
	go func() {
		s.Close()
		close(ended)
	}()
	<-s.closing
	close(goOn)
	<-ended
	want := AppendReply(nil, &LookupRequest{Form: FormOwn}, LookupReply{Tokens: 7})
	if got := closed(t, nc); !bytes.HasSuffix(got, want) || len(got) == 0 {
		t.Errorf("answer %x, want %x", got, want)
	}
	if got := closed(t, silent); len(got) != 0 {
		t.Errorf("a silent peer got %x", got)
	}
}

// More peers than allowed: the further one is closed, and one is free when another leaves. Those
// that say nothing give way.
func TestLookupPeers(t *testing.T) {
	s := serveLookups(t, socketDir(t), "lookup", echoHandler)
	var all []net.Conn
	for range MaxLookupPeers {
		all = append(all, dialRaw(t, s.Path()))
	}
	pooltest.Until(t, "all are clients", func() bool { return s.o.Peers.Held() == MaxLookupPeers })
	turnedAway(t, s)
	all[0].Close()
	letIn(t, s)
	for _, nc := range all {
		nc.Close()
	}
	for range 2 * MaxLookupPeers {
		var nc net.Conn
		var err error
		pooltest.Until(t, "room among those that are not accepted yet", func() bool {
			nc, err = net.Dial("unix", s.Path())
			return !errors.Is(err, unix.EAGAIN)
		})
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
	}
	letIn(t, s)
}

// turnedAway: a server closes one more connection, and says nothing to it.
func turnedAway(t *testing.T, s *LookupServer) {
	t.Helper()
	nc, err := net.Dial("unix", s.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	nc.SetDeadline(time.Now().Add(testTimeout))
	if got := closed(t, nc); len(got) != 0 {
		t.Errorf("one peer too many got %x", got)
	}
}

// letIn: now that a peer has left, another one is served.
func letIn(t *testing.T, s *LookupServer) {
	t.Helper()
	l := dialLookup(t, s.Path())
	defer l.Close()
	if _, err := l.Ask(&LookupRequest{}, testTimeout); err != nil {
		t.Errorf("after a peer left: %v", err)
	}
}

// Sockets may share what connections they may have: one socket's clients do not take
// the descriptors of all.
func TestLookupPeersOfAllSockets(t *testing.T) {
	peers, dir := connlimit.ForUsers(3), socketDir(t)
	one, two := serveShared(t, peers, dir, "one", echoHandler), serveShared(t, peers, dir, "two", echoHandler)
	first := dialRaw(t, one.Path())
	dialRaw(t, one.Path())
	dialRaw(t, two.Path())
	pooltest.Until(t, "all are clients", func() bool { return peers.Held() == 3 })
	turnedAway(t, two)
	if n := two.Counters().Dropped; n != 1 {
		t.Errorf("%d connections dropped, want 1", n)
	}
	first.Close()
	letIn(t, two)
}

// byteByByte gives a stream in pieces of one byte, then its end.
type byteByByte struct{ rest []byte }

func (b *byteByByte) Read(p []byte) (int, error) {
	if len(b.rest) == 0 {
		return 0, io.EOF
	}
	p[0] = b.rest[0]
	b.rest = b.rest[1:]
	return 1, nil
}

// FuzzZMTP reads any stream: at once and byte by byte give the same messages, and the part kept of
// one is within the limits.
func FuzzZMTP(f *testing.F) {
	f.Add(append([]byte{zmtpMore, 0}, zmtpFrame(0, []byte("lookup"))...))
	f.Add(append(zmtpFrame(zmtpCommand, []byte("\x04PING\x00\x00")), zmtpFrame(zmtpMore, make([]byte, 300))...))
	f.Fuzz(func(t *testing.T, stream []byte) {
		read := func(src io.Reader) (all []Frames, err error) {
			z := zmtpReader{src: src, buf: make([]byte, zmtpBuffer), grow: func() error { return nil }}
			for {
				if err = z.next(); err != nil {
					return all, err
				}
				if len(z.message.Buf) > MaxLookupBytes+keepHead || z.message.Len() > MaxLookupFrames+1 {
					t.Fatalf("%d bytes, %d frames are kept", len(z.message.Buf), z.message.Len())
				}
				all = append(all, Frames{Buf: bytes.Clone(z.message.Buf),
					Ends: append([]int32(nil), z.message.Ends...)})
			}
		}
		a, ea := read(bytes.NewReader(stream))
		b, eb := read(&byteByByte{stream})
		if len(a) != len(b) || errors.Is(ea, errZMTP) != errors.Is(eb, errZMTP) {
			t.Fatalf("%d messages, %v; byte by byte %d, %v", len(a), ea, len(b), eb)
		}
		for i := range a {
			if !bytes.Equal(a[i].Buf, b[i].Buf) || len(a[i].Ends) != len(b[i].Ends) {
				t.Fatalf("message %d differs byte by byte", i)
			}
		}
	})
}

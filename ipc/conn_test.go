package ipc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const testTimeout = 10 * time.Second

func listenSession(t testing.TB, o SessionOptions) *SessionListener {
	t.Helper()
	if o.Path == "" {
		o.Path = filepath.Join(socketDir(t), socketdir.Session)
	}
	l, err := ListenSession(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// sessionPair is an agent's and a client's end after the handshake.
func sessionPair(t testing.TB) (agent, client *Conn) {
	t.Helper()
	l := listenSession(t, SessionOptions{})
	var wg sync.WaitGroup
	wg.Go(func() {
		var err error
		if agent, err = l.Accept(); err == nil {
			_, err = ServeHandshake(agent, Welcome{Session: 1})
		}
		if err != nil {
			t.Error(err)
		}
	})
	client, _, err := DialSession(t.Context(), l.o.Path, "test")
	if err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	t.Cleanup(func() { agent.Close(); client.Close() })
	return agent, client
}

// rawPair is an agent's end, and the client's as a plain socket that can do anything.
func rawPair(t testing.TB) (agent *Conn, raw *net.UnixConn) {
	t.Helper()
	l := listenSession(t, SessionOptions{})
	raw, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: l.o.Path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	if agent, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { agent.Close(); raw.Close() })
	return agent, raw
}

func frameOf(msg any) []byte {
	b := enc(msg)
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)
}

// Every message in both directions.
func TestConnMessages(t *testing.T) {
	agent, client := sessionPair(t)
	for _, m := range sessionMessages() {
		if descriptors(m.msg) > 0 {
			continue
		}
		for _, way := range [][2]*Conn{{agent, client}, {client, agent}} {
			var wg sync.WaitGroup
			wg.Go(func() {
				if err := way[0].Send(m.msg); err != nil {
					t.Errorf("%s: %v", m.name, err)
				}
			})
			got, _, err := way[1].Recv()
			wg.Wait()
			if err != nil || !reflect.DeepEqual(got, m.msg) {
				t.Fatalf("%s: received %+v, %v", m.name, got, err)
			}
		}
	}
}

// Many senders: frames are not mixed.
func TestConnManySenders(t *testing.T) {
	agent, client := sessionPair(t)
	const senders, each = 8, 200
	var wg sync.WaitGroup
	for s := range senders {
		wg.Go(func() {
			for i := range each {
				if err := client.Send(&Done{Job: uint64(s*each + i),
					Status: make([]byte, (s*each+i)%5000)}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	seen := map[uint64]bool{}
	for range senders * each {
		m, _, err := agent.Recv()
		if err != nil {
			t.Fatal(err)
		}
		d := m.(*Done)
		if seen[d.Job] || len(d.Status) != int(d.Job%5000) {
			t.Fatalf("job %d came twice or with %d bytes", d.Job, len(d.Status))
		}
		seen[d.Job] = true
	}
	wg.Wait()
}

func TestConnSlowFrames(t *testing.T) {
	agent, raw := rawPair(t)
	frame := frameOf(&Done{Job: 5, Status: make([]byte, 300)})
	go func() {
		for i := range frame {
			raw.Write(frame[i : i+1])
		}
	}()
	if m, _, err := agent.Recv(); err != nil || m.(*Done).Job != 5 {
		t.Errorf("a byte at a time: %+v, %v", m, err)
	}
	big := frameOf(&Done{Job: 6, Status: make([]byte, MaxJobBlocks)})
	go raw.Write(append(big, big...))
	for range 2 {
		if m, _, err := agent.Recv(); err != nil || len(m.(*Done).Status) != MaxJobBlocks {
			t.Errorf("two frames at once: %v", err)
		}
	}
}

func TestConnBadFrames(t *testing.T) {
	for name, v := range map[string]struct {
		bytes []byte
		want  string
	}{
		"huge length":  {[]byte{0xff, 0xff, 0xff, 0xff, 1}, "4294967295, allowed is 1 to 1048576"},
		"above":        {[]byte{0, 0x10, 0, 1, 1}, "1048577, allowed is 1 to 1048576"},
		"length 0":     {[]byte{0, 0, 0, 0}, "allowed is 1 to"},
		"no message":   {[]byte{0, 0, 0, 1, 0xc0}, "not an array"},
		"half a head":  {[]byte{0, 0}, "unexpected EOF"},
		"half a frame": {[]byte{0, 0, 0, 9, 0x92}, "unexpected EOF"},
		"proper end":   {nil, "EOF"},
	} {
		agent, raw := rawPair(t)
		raw.Write(v.bytes)
		raw.CloseWrite()
		_, _, err := agent.Recv()
		if err == nil || !strings.Contains(err.Error(), v.want) {
			t.Errorf("%s: %v, want %q", name, err, v.want)
		}
		if _, _, again := agent.Recv(); again != err {
			t.Errorf("%s: a second Recv gives %v, want the same", name, again)
		}
		var m *MalformedError
		if errors.As(err, &m) {
			continue // the session can still send its ERROR
		}
		select {
		case <-agent.Dead():
		case <-time.After(testTimeout):
			t.Errorf("%s: Dead is open", name)
		}
	}
}

// A whole frame of the largest size passes; its memory comes in two steps.
func TestConnLargestFrame(t *testing.T) {
	agent, client := sessionPair(t)
	save := &Save{Sections: []Section{}}
	for range 4 {
		save.Sections = append(save.Sections, Section{HashLen: 32, Hashes: make([]byte, 2048*32),
			Blocks: make([]byte, 2048*4)})
	}
	go client.Send(save)
	m, _, err := agent.Recv()
	if err != nil || !reflect.DeepEqual(m, save) {
		t.Fatalf("%v", err)
	}
}

func TestConnClose(t *testing.T) {
	agent, client := sessionPair(t)
	done := make(chan error, 1)
	go func() {
		_, _, err := agent.Recv()
		done <- err
	}()
	if err := agent.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if !errors.Is(err, net.ErrClosed) {
			t.Errorf("Recv during Close: %v", err)
		}
	case <-time.After(testTimeout):
		t.Fatal("Recv did not return")
	}
	if !errors.Is(agent.Cause(), ErrClosed) {
		t.Errorf("cause %v, want ErrClosed", agent.Cause())
	}
	if _, _, err := client.Recv(); err != io.EOF {
		t.Errorf("the other end: %v, want EOF", err)
	}
	if err := client.Send(&Ping{}); err == nil {
		t.Error("sent into a closed session")
	}
	if err := agent.Close(); err != nil {
		t.Errorf("a second Close: %v", err)
	}
}

// After CloseWrite the peer sees the end and its last words still come.
func TestConnCloseWrite(t *testing.T) {
	agent, client := sessionPair(t)
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := agent.Recv(); err != io.EOF {
		t.Fatalf("%v, want EOF", err)
	}
	if err := agent.Send(&Pong{Req: 3}); err != nil {
		t.Fatal(err)
	}
	if m, _, err := client.Recv(); err != nil || m.(*Pong).Req != 3 {
		t.Errorf("%+v, %v", m, err)
	}
}

func TestConnPeer(t *testing.T) {
	agent, _ := sessionPair(t)
	p := agent.Peer()
	if p.Pid != os.Getpid() || p.Uid != uint32(os.Geteuid()) || p.Gid != uint32(os.Getegid()) {
		t.Errorf("peer %+v", p)
	}
	if agent.pidfd == nil {
		t.Skip("this kernel has no pidfd")
	}
	if err := unix.PidfdSendSignal(int(agent.pidfd.Fd()), 0, nil, 0); err != nil {
		t.Errorf("pidfd: %v", err)
	}
}

// TestConnSendRefuses expects that an invalid message is refused before a byte of it is sent.
func TestConnSendRefuses(t *testing.T) {
	agent, client := sessionPair(t)
	for name, err := range map[string]error{
		"bad message": client.Send(&Hello{}),
		"no message":  client.Send("text"),
		"by value":    client.Send(Ping{}),
		"surplus fd":  client.Send(&Ping{}, 0),
		"missing fd":  client.Send(&Regions{List: []RegionDesc{{Kind: RegionFD}}}),
	} {
		var m *MalformedError
		if !errors.As(err, &m) {
			t.Errorf("%s: %v, want a *MalformedError", name, err)
		}
	}
	if err := client.Send(&Ping{Req: 1}); err != nil {
		t.Fatal(err)
	}
	if m, _, err := agent.Recv(); err != nil || m.(*Ping).Req != 1 {
		t.Errorf("%+v, %v", m, err)
	}
}

func TestDialContext(t *testing.T) {
	l := listenSession(t, SessionOptions{}) // never accepts
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, _, err := DialSession(ctx, l.o.Path, "test")
		done <- err
	}()
	cancel()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v, want Canceled", err)
		}
	case <-time.After(testTimeout):
		t.Fatal("DialSession hangs")
	}
	if _, _, err := DialSession(t.Context(), fmt.Sprintf("/tmp/%0110d", 0), "test"); err == nil ||
		!strings.Contains(err.Error(), "allowed is 1 to 107") {
		t.Errorf("a long path: %v", err)
	}
}

// A frame that is begun and not finished is a dead peer; a silent one is not.
func TestConnStalls(t *testing.T) {
	agent, raw := rawPair(t)
	agent.times.frame = 30 * time.Millisecond
	raw.Write(frameOf(&Ping{Req: 1}))
	if _, _, err := agent.Recv(); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	go raw.Write([]byte{0, 0, 0, 9, 0x92})
	hang := time.AfterFunc(testTimeout, func() { raw.Close() })
	_, _, err := agent.Recv()
	hang.Stop()
	if !errors.Is(err, ErrStalled) {
		t.Errorf("half a frame: %v, want ErrStalled", err)
	}
	if took := time.Since(start); took < 30*time.Millisecond || took > testTimeout {
		t.Errorf("given up after %v, want 30ms", took)
	}
	if !errors.Is(agent.Cause(), ErrStalled) {
		t.Errorf("cause %v", agent.Cause())
	}
}

// A peer that reads nothing ends the session when its buffer is full, in bounded time.
func TestConnSendStalls(t *testing.T) {
	agent, _ := rawPair(t)
	agent.times.send = 30 * time.Millisecond
	done := &Done{Status: make([]byte, MaxJobBlocks)}
	var err error
	for range 10000 {
		if err = agent.Send(done); err != nil {
			break
		}
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%v, want a deadline", err)
	}
	if again := agent.Send(&Ping{}); again == nil {
		t.Error("sent after half a frame")
	}
	select {
	case <-agent.Dead():
	default:
		t.Error("Dead is open")
	}
}

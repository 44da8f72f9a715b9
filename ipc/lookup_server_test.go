package ipc

import (
	"bytes"
	"encoding/binary"
	"errors"
	"github.com/kvagent/kvagent/connlimit"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"maps"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"
)

// socketDir is a short directory of its own: socket paths have 107 bytes.
func socketDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kv")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

var testBoot = [16]byte(run(0x10, 16))

// echoHandler answers with what it was asked, so that a mix-up shows.
func echoHandler(r *LookupRequest, _ time.Time) LookupReply {
	n := 0
	if r.HashLen > 0 {
		n = len(r.Hashes) / r.HashLen
	}
	return LookupReply{Tokens: uint32(r.Tokens) - r.HBMTokens, Blocks: uint64(n), Lease: r.Session, Boot: testBoot}
}

func serveLookups(t testing.TB, dir, name string, h LookupHandler) *LookupServer {
	t.Helper()
	return serveShared(t, nil, dir, name, h)
}

// serveShared serves look-ups on a socket that shares a limit of connections with others.
func serveShared(t testing.TB, peers *connlimit.Limit, dir, name string, h LookupHandler) *LookupServer {
	t.Helper()
	s, err := listenLookup(LookupOptions{Dir: dir, Name: name, Boot: testBoot, Peers: peers}, h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// Every form over a real socket by libzmq's own REQ, and what comes back.
func TestLookupForms(t *testing.T) {
	s := serveLookups(t, socketDir(t), "lookup", echoHandler)
	req, err := testZMQ(t).NewSocket(zmq.REQ)
	if err != nil {
		t.Fatal(err)
	}
	defer req.Close()
	req.SetRcvtimeo(5 * time.Second)
	if err := req.Connect("ipc://" + s.Path()); err != nil {
		t.Fatal(err)
	}
	for _, n := range lookupRequests() {
		want := AppendReply(nil, &n.r, echoHandler(&n.r, time.Time{}))
		if got := askPlain(t, req, encodeRequest(&n.r)); !bytes.Equal(got, want) {
			t.Errorf("%s: reply %x, want %x", n.name, got, want)
		}
	}
	for name, frames := range malformedRequests() {
		if len(frames) == 0 {
			continue // REQ cannot send it
		}
		var p Parser
		var r LookupRequest
		p.Parse(framesOf(frames), &r)
		want := AppendReply(nil, &r, LookupReply{Status: LookupMalformed, Boot: testBoot})
		if got := askPlain(t, req, frames); !bytes.Equal(got, want) {
			t.Errorf("%s: reply %x, want %x", name, got, want)
		}
	}
	count := s.Counters()
	if count.Unsent != 0 || count.Malformed != uint64(len(malformedRequests())-1) {
		t.Errorf("%d unsent, %d malformed, want 0, %d", count.Unsent, count.Malformed, len(malformedRequests())-1)
	}
}

func askPlain(t *testing.T, req *zmq.Socket, frames [][]byte) []byte {
	t.Helper()
	if _, err := req.SendMessage(frames); err != nil {
		t.Fatal(err)
	}
	got, err := req.RecvMessageBytes(0)
	if err != nil || len(got) != 1 {
		t.Fatalf("reply %x, %v", got, err)
	}
	return got[0]
}

// Too many frames, too many bytes, no delimiter: each is answered, and the next one still is.
func TestLookupLimits(t *testing.T) {
	s := serveLookups(t, socketDir(t), "lookup", echoHandler)
	dealer, err := testZMQ(t).NewSocket(zmq.DEALER)
	if err != nil {
		t.Fatal(err)
	}
	defer dealer.Close()
	dealer.SetRcvtimeo(10 * time.Second)
	if err := dealer.Connect("ipc://" + s.Path()); err != nil {
		t.Fatal(err)
	}
	frames := func(n int, b []byte) (all [][]byte) {
		for range n {
			all = append(all, b)
		}
		return all
	}
	hash, tokens := run(0, 32), []byte{1, 0, 0, 0, 0, 0, 0, 0}
	own := encodeRequest(&LookupRequest{Form: FormOwn})[0]
	zero4, zero8 := make([]byte, 4), make([]byte, 8)
	malformedOwn := AppendReply(nil, &LookupRequest{Form: FormOwn},
		LookupReply{Status: LookupMalformed, Boot: testBoot})
	most := binary.LittleEndian.AppendUint64(nil, MaxLookupFrames-1)
	for _, v := range []struct {
		name       string
		send, want [][]byte
		malformed  uint64
	}{
		{"most frames", append([][]byte{{}, tokens}, frames(MaxLookupFrames-1, hash)...), [][]byte{{}, most},
			0},
		{"a frame too many", append([][]byte{{}, tokens}, frames(MaxLookupFrames, hash)...), [][]byte{{}, zero8},
			1},
		{"far too many frames", append([][]byte{{}, tokens}, frames(100000, hash)...), [][]byte{{}, zero8},
			1},
		{"own too large", [][]byte{{}, append(bytes.Clone(own), make([]byte, MaxLookupBytes)...)},
			[][]byte{{}, malformedOwn}, 1},
		{"own far too large", [][]byte{{}, append(bytes.Clone(own), make([]byte, MaxLookupBytes+1<<20)...)},
			[][]byte{{}, malformedOwn}, 1},
		// The part of it that is kept would be a proper request for one hash.
		{"upstream far too large", [][]byte{{}, []byte("lookup"), {0, 0, 1, 0}, {0, 16},
			make([]byte, MaxLookupBytes+1<<20)}, [][]byte{{}, zero4}, 1},
		{"sum too large", [][]byte{{}, {0, 0, 0, 1}, make([]byte, MaxLookupBytes/2), make([]byte, MaxLookupBytes/2)},
			[][]byte{{}, zero4}, 1},
		{"no delimiter", [][]byte{own}, [][]byte{zero4}, 1},
		{"no delimiter, two frames", [][]byte{{0, 0, 0, 1}, {0x90}}, [][]byte{zero4}, 1},
		{"delimiter alone", [][]byte{{}}, [][]byte{{}, zero4}, 1},
		{"proper", [][]byte{{}, own}, [][]byte{{}, AppendReply(nil, &LookupRequest{Form: FormOwn},
			LookupReply{Boot: testBoot})}, 0},
	} {
		before := s.Counters()
		if _, err := dealer.SendMessage(v.send); err != nil {
			t.Fatal(err)
		}
		got, err := dealer.RecvMessageBytes(0)
		if err != nil {
			t.Fatalf("%s: no answer: %v", v.name, err)
		}
		if !bytes.Equal(bytes.Join(got, []byte("|")), bytes.Join(v.want, []byte("|"))) {
			t.Errorf("%s: answer %x, want %x", v.name, got, v.want)
		}
		after := s.Counters()
		if after.Malformed != before.Malformed+v.malformed {
			t.Errorf("%s: %d counted as malformed, want %d", v.name, after.Malformed-before.Malformed, v.malformed)
		}
	}
	s.mu.Lock()
	peers := slices.Collect(maps.Keys(s.peers))
	s.mu.Unlock()
	s.Close()
	for _, p := range peers {
		if kept := cap(p.in.message.Buf); kept > keepReceived {
			t.Errorf("%d bytes of a large message are kept, allowed is %d", kept, keepReceived)
		}
	}
}

// A storm of nonsense from some clients while others ask properly: all are answered.
func TestLookupStorm(t *testing.T) {
	var told atomic.Uint64
	s, err := listenLookup(LookupOptions{Dir: socketDir(t), Name: "lookup", Boot: testBoot,
		OnMalformed: func(error) { told.Add(1) }}, echoHandler)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() { storm(t, s.Path()) })
	}
	for range 2 {
		wg.Go(func() { askMany(t, s.Path(), 300) })
	}
	wg.Wait()
	s.Close()
	counted := s.Counters().Malformed
	if told.Load() == 0 || told.Load() != counted {
		t.Errorf("told of malformed requests %d times, %d are counted", told.Load(), counted)
	}
}

func storm(t *testing.T, path string) {
	l := dialLookup(t, path)
	defer l.Close()
	for range 10 {
		for name, frames := range malformedRequests() {
			if len(frames) == 0 {
				continue
			}
			if _, err := l.Exchange(framesOf(frames), 10*time.Second); err != nil {
				t.Errorf("%s: %v", name, err)
				return
			}
		}
	}
}

func askMany(t *testing.T, path string, n int) {
	l := dialLookup(t, path)
	defer l.Close()
	for i := range n {
		a, err := l.Ask(&LookupRequest{Tokens: uint64(i), Session: uint64(i) << 20}, 10*time.Second)
		if err != nil || a.Tokens != uint32(i) || a.Lease != uint64(i)<<20 {
			t.Errorf("question %d: %+v, %v", i, a, err)
			return
		}
	}
}

// A message that makes its reader panic is malformed, and says where.
func TestReaderPanics(t *testing.T) {
	type broken struct{ N map[int]int } // a field that cannot be read
	messages[math.MaxUint8] = &message{of: reflect.TypeOf(broken{}), name: "BROKEN", fields: []field{{name: "n"}}}
	defer func() { messages[math.MaxUint8] = nil }()
	p := &lookupPeer{s: &LookupServer{o: LookupOptions{Counts: &LookupCounts{}}}}
	for name, read := range map[string]func() error{
		"session": func() error {
			_, err := Decode([]byte{mpArray | 2, mpUint8, math.MaxUint8, 0})
			return err
		},
		"look-up": func() error { // a frame beyond the message's end
			p.in.enveloped, p.in.message = true, Frames{Buf: []byte("x"), Ends: []int32{1 << 20}}
			return p.parse()
		},
	} {
		var bad *MalformedError
		if err := read(); !errors.As(err, &bad) || !strings.Contains(err.Error(), "ipc.") {
			t.Errorf("%s: error %v, want one with the stack", name, err)
		}
	}
}

// One socket's end does not disturb another, its file goes, and its name can be served again at
// once.
func TestLookupSocketFiles(t *testing.T) {
	dir := socketDir(t)
	keep := serveLookups(t, dir, "keep", echoHandler)
	l := dialLookup(t, keep.Path())
	defer l.Close()
	for i := range 20 {
		s := serveLookups(t, dir, "comes-and-goes", echoHandler)
		info, err := os.Stat(s.Path())
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Fatalf("socket %v, %v, want mode 600", info, err)
		}
		m := dialLookup(t, s.Path())
		if _, err := m.Ask(&LookupRequest{}, 5*time.Second); err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		m.Close()
		s.Close()
		if all, _ := os.ReadDir(dir); len(all) != 1 {
			t.Fatalf("left in the directory: %v", all)
		}
		if _, err := l.Ask(&LookupRequest{}, 5*time.Second); err != nil {
			t.Fatalf("the other socket, round %d: %v", i, err)
		}
	}
}

func TestLookupLiveSocketIsNotTaken(t *testing.T) {
	dir := socketDir(t)
	s := serveLookups(t, dir, "lookup", echoHandler)
	_, err := listenLookup(LookupOptions{Dir: dir, Name: "lookup"}, echoHandler)
	if !errors.Is(err, socketdir.ErrInUse) {
		t.Errorf("a second server: %v, want socketdir.ErrInUse", err)
	}
	foreign, err := testZMQ(t).NewSocket(zmq.REP)
	if err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	if err := foreign.Bind("ipc://" + filepath.Join(dir, "foreign")); err != nil {
		t.Fatal(err)
	}
	_, err = listenLookup(LookupOptions{Dir: dir, Name: "foreign"}, echoHandler)
	if !errors.Is(err, socketdir.ErrInUse) {
		t.Errorf("the socket of a server without our lock: %v, want socketdir.ErrInUse", err)
	}
	l := dialLookup(t, s.Path())
	defer l.Close()
	if _, err := l.Ask(&LookupRequest{}, 5*time.Second); err != nil {
		t.Errorf("the first server: %v", err)
	}
}

// A client that asks long before it reads gets an answer to each request all the same.
func TestAnswersWaitForAClientThatReadsLate(t *testing.T) {
	const requests = 1000
	s := serveLookups(t, socketDir(t), "lookup", echoHandler)
	dealer, err := testZMQ(t).NewSocket(zmq.DEALER)
	if err != nil {
		t.Fatal(err)
	}
	defer dealer.Close()
	dealer.SetRcvtimeo(10 * time.Second)
	if err := dealer.Connect("ipc://" + s.Path()); err != nil {
		t.Fatal(err)
	}
	own := encodeRequest(&LookupRequest{Form: FormOwn})[0]
	for range requests {
		if _, err := dealer.SendMessage([]byte{}, own); err != nil {
			t.Fatal(err)
		}
	}
	for i := range requests {
		if _, err := dealer.RecvMessageBytes(0); err != nil {
			t.Fatalf("%d of %d requests answered: %v", i, requests, err)
		}
	}
}

// A client that never reads is waited for, and then closed: its answer is counted, and everybody
// else is served.
func TestAnswersNobodyReads(t *testing.T) {
	var heard atomic.Uint64
	s, err := listenLookup(LookupOptions{Dir: socketDir(t), Name: "lookup",
		OnUnsent: func(LookupReply) { heard.Add(1) }}, echoHandler)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	dealer, err := testZMQ(t).NewSocket(zmq.DEALER)
	if err != nil {
		t.Fatal(err)
	}
	defer dealer.Close()
	dealer.SetLinger(0)
	dealer.SetRcvhwm(1)
	if err := dealer.Connect("ipc://" + s.Path()); err != nil {
		t.Fatal(err)
	}
	l := dialLookup(t, s.Path())
	defer l.Close()
	own := encodeRequest(&LookupRequest{Form: FormOwn})[0]
	for deadline := time.Now().Add(2 * testTimeout); s.Counters().Unsent == 0; {
		for err = nil; err == nil; {
			_, err = dealer.SendMessageDontwait([]byte{}, own)
		}
		if !errors.Is(zmq.AsErrno(err), zmq.Errno(unix.EAGAIN)) {
			t.Fatal(err)
		}
		if _, err := l.Ask(&LookupRequest{}, testTimeout); err != nil {
			t.Fatalf("another client: %v", err)
		}
		if time.Now().After(deadline) {
			t.Fatalf("no answer was counted as unsent: %+v", s.Counters())
		}
	}
	s.Close()
	if counted := s.Counters().Unsent; heard.Load() != counted {
		t.Errorf("%d unsent answers were told, %d counted", heard.Load(), counted)
	}
}

// listenLookup listens with defaults for what a test does not set.
func listenLookup(o LookupOptions, h LookupHandler) (*LookupServer, error) {
	if o.Counts == nil {
		o.Counts = &LookupCounts{}
	}
	if o.Peers == nil {
		o.Peers = connlimit.ForUsers(MaxLookupPeers)
	}
	if o.OnMalformed == nil {
		o.OnMalformed = func(error) {}
	}
	if o.OnUnsent == nil {
		o.OnUnsent = func(LookupReply) {}
	}
	if o.OnAnswered == nil {
		o.OnAnswered = func(*LookupRequest, *LookupReply) {}
	}
	return ListenLookup(o, h)
}

type lookupCounters struct {
	Unsent, Dropped, Waited, Malformed uint64
}

// Counters returns a snapshot of a server's counters.
func (s *LookupServer) Counters() (out lookupCounters) {
	c := s.o.Counts
	out.Unsent = c.Unsent.Load()
	out.Dropped, out.Waited, out.Malformed = c.Dropped.Load(), c.Waited.Load(), c.Malformed.Load()
	return out
}

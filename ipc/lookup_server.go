package ipc

import (
	"errors"
	"net"
	"path/filepath"
	"sync"
	"time"

	"github.com/kvagent/kvagent/connlimit"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// Limits of a look-up socket.
const (
	MaxLookupPeers = 1024 // connections at once; of one more, the user with most gives way
	// LargeMessages is how many messages above keepReceived a socket reads at once; one more waits,
	// as long as a message may take.
	LargeMessages = 8
	// keepReceived is the size, in bytes, up to which a connection keeps its message buffer: that
	// of 2,048 hashes in any form.
	keepReceived = 256 << 10
	keepEnds     = 2 * 4096 // ends of frames that it keeps
	// lookupLinger is how long a closing socket waits for answers that are being written.
	lookupLinger = 200 * time.Millisecond
	// acceptPause is the pause after the limit of open files is reached.
	acceptPause = 50 * time.Millisecond
)

// LookupHandler answers one request. One call runs at a time, and it keeps nothing of the request.
// Only well-formed requests reach it; FormReset is answered with LookupHit when done. A request's
// deadline counts from its arrival, before it waited for its turn.
type LookupHandler func(r *LookupRequest, arrived time.Time) LookupReply

// LookupOptions configures a look-up server.
type LookupOptions struct {
	Dir, Name   string
	SocketGroup int      // gid that may reach the socket; 0: none
	Boot        [16]byte // for the answers to malformed requests
	// Several calls of the following may run at once, and concurrently with the handler.
	// OnMalformed is called for a malformed request, or a connection that does not speak ZMTP.
	OnMalformed func(err error)
	// OnUnsent is called for an answer to a client that disconnected or does not read.
	OnUnsent func(LookupReply)
	// OnAnswered is called after an answer was sent, or could not be, before the peer's next
	// request is read. It keeps nothing of the request.
	OnAnswered func(*LookupRequest, *LookupReply)
	// Several servers may share these. Peers limits the connections.
	Counts *LookupCounts
	Peers  *connlimit.Limit
}

// LookupServer serves look-ups of all forms on one socket, with exactly one reply for each request,
// valid or not. Each connection has a goroutine that reads, parses and writes; one of them at a
// time calls the handler.
type LookupServer struct {
	o       LookupOptions
	handler LookupHandler
	l       *socketdir.Listener
	large   chan struct{} // a place for each large message
	closing chan struct{}
	close   sync.Once
	running sync.WaitGroup // the accepting goroutine and the peers
	err     error          // of Close

	turn sync.Mutex // held while the handler runs

	mu    sync.Mutex
	peers map[*lookupPeer]struct{}
}

// ListenLookup serves look-ups at Dir/Name until Close. The error wraps socketdir.ErrInUse if
// another process serves the path.
func ListenLookup(o LookupOptions, handler LookupHandler) (*LookupServer, error) {
	s := &LookupServer{
		o: o, handler: handler, large: make(chan struct{}, LargeMessages), closing: make(chan struct{}),
		peers: make(map[*lookupPeer]struct{}),
	}
	var err error
	if s.l, err = socketdir.Listen(s.Path(), o.SocketGroup); err != nil {
		return nil, err
	}
	s.running.Go(s.accept)
	return s, nil
}

// Path returns the path of the socket.
func (s *LookupServer) Path() string { return filepath.Join(s.o.Dir, s.o.Name) }

// Close stops serving and removes the socket's file. Requests that have arrived are answered; it
// waits at most lookupLinger for answers that are being written.
func (s *LookupServer) Close() error {
	s.close.Do(func() {
		close(s.closing)
		s.err = s.l.Close()
		s.mu.Lock()
		for p := range s.peers {
			p.hurry()
		}
		s.mu.Unlock()
		s.running.Wait()
	})
	return s.err
}

// accept is the goroutine that accepts peers.
func (s *LookupServer) accept() {
	for {
		nc, err := s.l.AcceptUnix()
		if err == nil {
			s.admit(nc)
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		// No error (no descriptor, no memory) ends the service of the socket while it is open.
		s.o.Counts.Waited.Add(1)
		time.Sleep(acceptPause)
	}
}

// admit starts a peer, unless there are too many.
func (s *LookupServer) admit(nc *net.UnixConn) {
	giveWay := func() {
		s.o.Counts.Dropped.Add(1)
		nc.Close()
	}
	p := newLookupPeer(s, nc)
	var err error
	if p.place, err = s.o.Peers.Enter(connlimit.Of(nc), giveWay); err != nil {
		giveWay()
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.peers[p] = struct{}{}
	s.running.Go(p.run)
}

func (s *LookupServer) leave(p *lookupPeer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.peers, p)
	p.place.Leave()
}

func (s *LookupServer) ending() bool {
	select {
	case <-s.closing:
		return true
	default:
		return false
	}
}

// handle calls the handler.
func (s *LookupServer) handle(r *LookupRequest) LookupReply {
	arrived := time.Now()
	s.turn.Lock()
	defer s.turn.Unlock()
	return s.handler(r, arrived)
}

// malformed counts and reports a malformed request.
func (s *LookupServer) malformed(err error) {
	if errors.As(err, new(*MalformedError)) {
		s.o.Counts.Malformed.Add(1)
	}
	s.o.OnMalformed(err)
}

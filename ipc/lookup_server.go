package ipc

import (
	"errors"
	"fmt"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"net"
	"path/filepath"
	"sync"
	"time"

	"github.com/kvagent/kvagent/connlimit"
)

// Limits of a look-up socket.
const (
	MaxLookupPeers = 512 // connections at once; of one more, the user with most gives way
	// LargeMessages is how many messages above keepReceived a socket reads at once; one more waits,
	// as long as a message may take.
	LargeMessages = 8
	// keepReceived is the size, in bytes, up to which a connection keeps its message buffer: that
	// of 2,048 hashes in any form.
	keepReceived = 256 << 10
	keepEnds     = 2 * 4096 // ends of frames that it keeps
	// lookupLinger is how long a closing socket waits for answers that are being written.
	lookupLinger = 200 * time.Millisecond
	// MalformedLogInterval is the least time between two calls of OnMalformed by one server.
	MalformedLogInterval = time.Second
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
	// OnMalformed, if set, is called for a malformed request, or a connection that does not speak
	// ZMTP, at most every MalformedLogInterval; skipped counts those since the last call.
	OnMalformed func(err error, skipped uint64)
	// OnUnsent, if set, is called for an answer that was not delivered because the client
	// disconnected or does not read. Several calls may run at once, and concurrently with the
	// handler.
	OnUnsent func(LookupReply)
	// OnAnswered, if set, is called after an answer was sent, or could not be, before the peer's
	// next request is read. It keeps nothing of the request. Several calls may run at once, and
	// concurrently with the handler.
	OnAnswered func(*LookupRequest, *LookupReply)
	// OnPanic, if set, is called for every panic of the handler, and of the reading of a message,
	// on the stack that panicked. If OnPanic itself panics, the process ends.
	OnPanic func(value any)
}

// MaxLookupSockets is the maximum of look-up servers in one Context.
const MaxLookupSockets = 256

// Context holds the look-up sockets of a process, which needs only one. Its methods may be called
// from any goroutine.
type Context struct {
	peers *connlimit.Limit // connections to all its servers

	mu struct {
		sync.Mutex
		open   map[*LookupServer]struct{}
		closed bool
	}
}

// NewContext returns a context without sockets.
func NewContext() *Context {
	c := &Context{peers: connlimit.ForUsers(MaxLookupSockets * MaxLookupPeers)}
	c.mu.open = map[*LookupServer]struct{}{}
	return c
}

// LimitPeers limits the connections to all servers of the context together, as MaxLookupPeers does
// those of a server. It is called before the first server exists.
func (c *Context) LimitPeers(n int64) { c.peers = connlimit.ForUsers(int(n)) }

// add registers a server.
func (c *Context) add(s *LookupServer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return fmt.Errorf("look-up context: %w", ErrClosed)
	}
	if len(c.mu.open) >= MaxLookupSockets {
		return fmt.Errorf("look-up sockets: more than %d", MaxLookupSockets)
	}
	c.mu.open[s] = struct{}{}
	return nil
}

func (c *Context) remove(s *LookupServer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.open, s)
}

// Close closes all open servers, and waits at most lookupLinger for answers that are being written.
func (c *Context) Close() error {
	c.mu.Lock()
	if c.mu.closed {
		c.mu.Unlock()
		return nil
	}
	c.mu.closed = true
	left := make([]*LookupServer, 0, len(c.mu.open))
	for s := range c.mu.open {
		left = append(left, s)
	}
	c.mu.Unlock()
	var err error
	for _, s := range left {
		err = errors.Join(err, s.Close())
	}
	return err
}

// LookupServer serves look-ups of all forms on one socket, with exactly one reply for each request,
// valid or not. Each connection has a goroutine that reads, parses and writes; one of them at a
// time calls the handler.
type LookupServer struct {
	o       LookupOptions
	handler LookupHandler
	ctx     *Context
	l       *socketdir.Listener
	large   chan struct{} // a place for each large message
	closing chan struct{}
	close   sync.Once
	running sync.WaitGroup // the accepting goroutine and the peers
	err     error          // of Close
	count   lookupCounts

	turn sync.Mutex // held while the handler runs

	places *connlimit.Limit

	mu    sync.Mutex
	peers map[*lookupPeer]struct{}
	quiet struct {
		until   time.Time
		skipped uint64
	}
}

// ListenLookup serves look-ups at Dir/Name until Close. The error wraps socketdir.ErrInUse if
// another process serves the path, and names that process.
func (c *Context) ListenLookup(o LookupOptions, handler LookupHandler) (*LookupServer, error) {
	if o.Name == "." || o.Name == ".." || filepath.Base(o.Name) != o.Name {
		return nil, fmt.Errorf("look-up socket: name %q, allowed is the name of a file", o.Name)
	}
	s := &LookupServer{
		o: o, handler: handler, ctx: c, large: make(chan struct{}, LargeMessages), closing: make(chan struct{}),
		peers: make(map[*lookupPeer]struct{}), places: connlimit.ForUsers(MaxLookupPeers),
	}
	if err := c.add(s); err != nil {
		return nil, err
	}
	var err error
	if s.l, err = socketdir.Listen(s.Path(), o.SocketGroup); err != nil {
		c.remove(s)
		return nil, err
	}
	s.running.Go(s.accept)
	return s, nil
}

// Path returns the path of the socket.
func (s *LookupServer) Path() string { return filepath.Join(s.o.Dir, s.o.Name) }

// Close stops serving and removes the socket's file; other sockets of the context continue.
// Requests that have arrived are answered.
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
		s.ctx.remove(s)
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
		s.count.noDescriptor.Add(1)
		select {
		case <-time.After(acceptPause):
		case <-s.closing:
		}
	}
}

// admit starts a peer, unless there are too many.
func (s *LookupServer) admit(nc *net.UnixConn) {
	owner, giveWay := connlimit.Of(nc), func() {
		s.count.dropped.Add(1)
		nc.Close()
	}
	place, err := s.places.Enter(owner, giveWay)
	var shared *connlimit.Place
	if err == nil {
		if shared, err = s.ctx.peers.Enter(owner, giveWay); err != nil {
			place.Leave()
		}
	}
	var p *lookupPeer
	if err == nil {
		if p, err = newLookupPeer(s, nc); err != nil {
			place.Leave()
			shared.Leave()
		}
	}
	if err != nil {
		giveWay()
		return
	}
	p.places = [2]*connlimit.Place{place, shared}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.peers[p] = struct{}{}
	s.running.Go(p.run)
}

func (s *LookupServer) leave(p *lookupPeer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.peers, p)
	for _, place := range p.places {
		place.Leave()
	}
}

func (s *LookupServer) ending() bool {
	select {
	case <-s.closing:
		return true
	default:
		return false
	}
}

// handle calls the handler; a panic of it is answered as an overload.
func (s *LookupServer) handle(r *LookupRequest) (a LookupReply) {
	arrived := time.Now()
	s.turn.Lock()
	defer s.turn.Unlock()
	defer func() {
		if v := recover(); v != nil {
			a = LookupReply{Status: LookupOverloaded, Boot: s.o.Boot}
			s.panicked(v)
		}
	}()
	return s.handler(r, arrived)
}

// answered reports an answer. A panic costs the report.
func (s *LookupServer) answered(r *LookupRequest, a *LookupReply) {
	defer func() {
		if v := recover(); v != nil {
			s.panicked(v)
		}
	}()
	if s.o.OnAnswered != nil {
		s.o.OnAnswered(r, a)
	}
}

// panicked counts and reports a recovered panic.
func (s *LookupServer) panicked(value any) {
	s.count.panics.Add(1)
	if s.o.OnPanic != nil {
		s.o.OnPanic(value)
	}
}

// malformed counts a malformed request, and reports it at a limited rate.
func (s *LookupServer) malformed(err error) {
	var m *MalformedError
	if errors.As(err, &m) {
		s.count.reasons[m.Reason].Add(1)
	}
	if s.o.OnMalformed == nil {
		return
	}
	s.mu.Lock()
	now := time.Now()
	skipped := s.quiet.skipped
	tell := !now.Before(s.quiet.until)
	if tell {
		s.quiet.until, s.quiet.skipped = now.Add(MalformedLogInterval), 0
	} else {
		s.quiet.skipped++
	}
	s.mu.Unlock()
	if tell {
		s.o.OnMalformed(err, skipped)
	}
}

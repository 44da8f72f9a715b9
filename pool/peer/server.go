package peer

import (
	"errors"
	"net"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/connlimit"
)

// Server serves the blocks of a pool to other agents.
type Server struct {
	cfg      Config
	listener net.Listener
	count    counts
	budget   *budget      // of subscriptions
	pinned   atomic.Int64 // bytes, for one-sided reads of all connections
	serving  sync.WaitGroup

	strangers *connlimit.Limit // unauthenticated connections
	places    *connlimit.Limit // the others

	mu      sync.Mutex
	closed  bool
	pending map[net.Conn]struct{}
	conns   map[*served]struct{}
	known   []string // hosts that have authenticated, the latest last
}

// maxKnown bounds the hosts that a server knows. A quarter of the places of unauthenticated
// connections is kept for them.
const (
	maxKnown   = 256
	knownShare = 4
)

// Serve accepts connections until Close. The listener is the server's from then on.
func Serve(l net.Listener, cfg Config) (*Server, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, listener: l, budget: newBudget(&cfg.Limits),
		pending: map[net.Conn]struct{}{}, conns: map[*served]struct{}{},
		strangers: connlimit.New(cfg.Limits.Pending, cfg.Limits.Pending/knownShare),
		places:    connlimit.New(cfg.Limits.Connections, 0),
	}
	s.serving.Go(s.accept)
	return s, nil
}

// Addr returns the address that the server listens on.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Close ends all connections, and returns when nothing of the pool is pinned or read any more.
func (s *Server) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	s.closed = true
	for raw := range s.pending {
		_ = raw.Close()
	}
	for c := range s.conns {
		c.close()
	}
	s.mu.Unlock()
	err := s.listener.Close()
	s.serving.Wait()
	return err
}

// accept gives each connection a goroutine. An error that is not the listener's end (no descriptors
// left, say) is retried after a pause.
func (s *Server) accept() {
	for {
		raw, err := s.listener.Accept()
		if err == nil {
			s.admit(raw)
			runtime.Gosched() // a client that has begun its handshake gives way after those that have not
			continue
		}
		if s.over() || errors.Is(err, net.ErrClosed) {
			return
		}
		s.cfg.Log("", "accept", err)
		time.Sleep(acceptPause)
	}
}

// acceptPause is the pause after a failed accept.
const acceptPause = 20 * time.Millisecond

func (s *Server) over() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// admit starts the handshake of a connection, or closes it because there are too many.
func (s *Server) admit(raw net.Conn) {
	place, err := s.strangers.Enter(s.owner(raw), func() {
		s.count.add(func(c *ServerStats) { c.RefusedPending++ })
		_ = raw.Close()
	})
	if err != nil {
		s.count.add(func(c *ServerStats) { c.RefusedPending++ })
		s.cfg.Log(host(raw), "refused: too many unauthenticated connections", err)
		_ = raw.Close()
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		place.Leave()
		_ = raw.Close()
		return
	}
	s.pending[raw] = struct{}{}
	s.serving.Go(func() { s.serve(raw, place) })
}

// owner returns who has made a connection.
func (s *Server) owner(raw net.Conn) connlimit.Owner {
	o := connlimit.Host(raw.RemoteAddr())
	s.mu.Lock()
	defer s.mu.Unlock()
	o.Kept = slices.Contains(s.known, o.Name)
	return o
}

// serve authenticates a connection and serves it to its end.
func (s *Server) serve(raw net.Conn, place *connlimit.Place) {
	defer raw.Close()
	c, err := accepted(raw, &s.cfg, func() { place.Set(connlimit.Busy) })
	place.Leave()
	if err != nil {
		s.forget(raw)
		if !s.over() {
			s.count.add(func(c *ServerStats) { c.Unauthenticated++ })
			s.cfg.Log(host(raw), "refused: not authenticated", err)
		}
		return
	}
	v := newServed(s, c)
	owner := connlimit.Host(raw.RemoteAddr())
	place, err = s.places.Enter(owner, v.close)
	if err != nil {
		s.forget(raw)
		s.count.add(func(c *ServerStats) { c.Refused++ })
		s.cfg.Log(host(raw), "refused: too many connections", err)
		return
	}
	defer place.Leave()
	place.Set(connlimit.Held)
	if s.enter(raw, v, owner.Name) {
		v.run()
		s.leave(v)
	}
}

func (s *Server) forget(raw net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pending, raw)
}

// enter moves a connection from the unauthenticated to the others.
func (s *Server) enter(raw net.Conn, v *served, owner string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pending, raw)
	if s.closed {
		return false
	}
	s.conns[v] = struct{}{}
	s.count.add(func(c *ServerStats) { c.Accepted++ })
	s.known = append(slices.DeleteFunc(s.known, func(known string) bool { return known == owner }), owner)
	s.known = s.known[max(len(s.known)-maxKnown, 0):]
	return true
}

func (s *Server) leave(v *served) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, v)
}

// host returns the host of a connection's other side: ports change with each connection.
func host(c net.Conn) string {
	a := c.RemoteAddr()
	if a == nil {
		return ""
	}
	h, _, err := net.SplitHostPort(a.String())
	if err != nil {
		return a.String()
	}
	return h
}

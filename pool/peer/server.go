package peer

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Server serves the blocks of a pool to other agents.
type Server struct {
	cfg      Config
	listener net.Listener
	log      *limitedLog
	count    serverCounts
	peers    traffic
	hashes   atomic.Int64 // of all subscriptions
	pinned   atomic.Int64 // bytes, for one-sided reads of all connections
	serving  sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	pending map[net.Conn]struct{}
	conns   map[*served]struct{}
}

// Serve accepts connections until Close. The listener is the server's from then on.
func Serve(l net.Listener, cfg Config) (*Server, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, listener: l, log: newLimitedLog(cfg.Log), pending: map[net.Conn]struct{}{},
		conns: map[*served]struct{}{},
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
			continue
		}
		if s.over() || errors.Is(err, net.ErrClosed) {
			return
		}
		s.log.say("", "accept", err)
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
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
	case len(s.pending) >= s.cfg.Limits.Pending:
		s.count.refusedPending.Add(1)
		s.log.say(host(raw), "refused: too many unauthenticated connections", nil)
	default:
		s.pending[raw] = struct{}{}
		s.serving.Go(func() { s.serve(raw) })
		return
	}
	_ = raw.Close()
}

// serve authenticates a connection and serves it to its end.
func (s *Server) serve(raw net.Conn) {
	defer raw.Close()
	c, err := accepted(raw, &s.cfg)
	if err != nil {
		s.forget(raw)
		if !s.over() {
			s.count.unauthenticated.Add(1)
			s.log.say(host(raw), "refused: not authenticated", err)
		}
		return
	}
	v := newServed(s, c)
	if s.enter(raw, v) {
		v.run()
		s.leave(v)
	}
}

func (s *Server) forget(raw net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pending, raw)
}

// enter moves a connection from the unauthenticated to the others, if there is room.
func (s *Server) enter(raw net.Conn, v *served) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pending, raw)
	if s.closed {
		return false
	}
	if len(s.conns) >= s.cfg.Limits.Connections {
		s.count.refused.Add(1)
		s.log.say(host(raw), "refused: too many connections", nil)
		return false
	}
	s.conns[v] = struct{}{}
	s.count.accepted.Add(1)
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

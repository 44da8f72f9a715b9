package ipc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/ipc/peercred"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// Error returns a received ERROR as an error.
func (m *Error) Error() string { return fmt.Sprintf("the peer says (code %d): %s", m.Code, m.Text) }

// ServeHandshake waits for HELLO on an accepted connection and answers with w in the highest
// version that both sides speak, which the connection then uses. It sets w.Version. If there is no
// such version, or no valid HELLO arrives within HandshakeTimeout, it sends ERROR and returns the
// error; the caller closes the connection.
func ServeHandshake(c *Conn, w Welcome, minVersion, maxVersion uint32) (*Hello, error) {
	msg, _, err := c.receive(HandshakeTimeout)
	if err != nil {
		return nil, c.refuse(ErrCodeMalformed, err)
	}
	hello, ok := msg.(*Hello)
	if !ok {
		return nil, c.refuse(ErrCodeMalformed, fmt.Errorf("%T came before HELLO", msg))
	}
	version := min(maxVersion, hello.MaxVersion)
	if version < minVersion || version < hello.MinVersion {
		return nil, c.refuse(ErrCodeVersion, fmt.Errorf("version: the client speaks %d to %d, allowed is %d to %d",
			hello.MinVersion, hello.MaxVersion, minVersion, maxVersion))
	}
	w.Version = version
	c.Served()
	if err := c.Send(&w); err != nil {
		return nil, err
	}
	c.version.Store(version)
	return hello, nil
}

// refuse sends why as an ERROR, if possible, and returns it.
func (c *Conn) refuse(code uint8, why error) error {
	if errors.Is(why, ErrPeerDied) || errors.Is(why, net.ErrClosed) {
		return why
	}
	return errors.Join(why, c.Send(&Error{Code: code, Text: why.Error()}))
}

// DialSession connects to the agent at path and performs the handshake. The error wraps an *Error
// if the agent refused.
func DialSession(ctx context.Context, path, software string, minVersion, maxVersion uint32) (*Conn, *Welcome, error) {
	if len(path) > MaxSocketPath {
		return nil, nil, fmt.Errorf("session socket %s: %d bytes, allowed is 1 to %d", path, len(path), MaxSocketPath)
	}
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, nil, fmt.Errorf("session: %w", err)
	}
	c, err := newConn(nc.(*net.UnixConn), false)
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.uc.Close() })
	w, err := c.hello(software, minVersion, maxVersion)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		c.Close()
		return nil, nil, fmt.Errorf("session %s: %w", path, errors.Join(ctx.Err(), err))
	}
	return c, w, nil
}

func (c *Conn) hello(software string, minVersion, maxVersion uint32) (*Welcome, error) {
	sent := c.Send(&Hello{MinVersion: minVersion, MaxVersion: maxVersion, Software: software})
	var malformed *MalformedError
	if errors.As(sent, &malformed) {
		return nil, sent
	}
	// An agent that refuses at once closes before our HELLO; its ERROR can still be read.
	msg, _, err := c.receive(HandshakeTimeout)
	if err != nil {
		return nil, errors.Join(sent, err)
	}
	switch m := msg.(type) {
	case *Error:
		return nil, m
	case *Welcome:
		if m.Version < minVersion || m.Version > maxVersion {
			return nil, fmt.Errorf("WELCOME: version: %d, allowed is %d to %d", m.Version, minVersion, maxVersion)
		}
		c.version.Store(m.Version)
		return m, sent
	}
	return nil, fmt.Errorf("%T came instead of WELCOME", msg)
}

// MaxSessions is how many connections a listener holds at once; one more is refused.
const MaxSessions = 2048

// acceptPause is the pause after the limit of open files is reached.
const acceptPause = 50 * time.Millisecond

// SessionOptions configures a session listener.
type SessionOptions struct {
	Path        string
	SocketGroup int      // gid that may reach the socket, and connect; 0: none
	UIDs, GIDs  []uint32 // of peers that may connect; both empty: this process's user and root
	// OnRefused, if set, is called for each peer that is refused.
	OnRefused func(peercred.Cred, error)
}

// SessionListener accepts sessions. Accept and Close may be called concurrently.
type SessionListener struct {
	l       *socketdir.Listener
	o       SessionOptions
	open    atomic.Int64
	refused atomic.Uint64
	closing chan struct{}
}

// ListenSession listens. The error wraps socketdir.ErrInUse if another process serves the path, and
// names that process.
func ListenSession(o SessionOptions) (*SessionListener, error) {
	if len(o.UIDs) == 0 && len(o.GIDs) == 0 {
		o.UIDs = []uint32{0, uint32(os.Geteuid())}
	}
	if o.SocketGroup != 0 {
		o.GIDs = append(slices.Clone(o.GIDs), uint32(o.SocketGroup))
	}
	l, err := socketdir.Listen(o.Path, o.SocketGroup)
	if err != nil {
		return nil, err
	}
	return &SessionListener{l: l, o: o, closing: make(chan struct{})}, nil
}

// Refused returns how many peers were refused.
func (s *SessionListener) Refused() uint64 { return s.refused.Load() }

// Accept waits for the next peer that may connect. Other peers get an ERROR with the reason and are
// disconnected. After Close the error is net.ErrClosed.
func (s *SessionListener) Accept() (*Conn, error) {
	for {
		uc, err := s.l.AcceptUnix()
		if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
			s.pause()
			continue
		}
		if err != nil {
			return nil, err
		}
		c, err := newConn(uc, true)
		if err != nil {
			s.refused.Add(1)
			continue
		}
		if s.admit(c) {
			return c, nil
		}
	}
}

func (s *SessionListener) pause() {
	select {
	case <-time.After(acceptPause):
	case <-s.closing:
	}
}

func (s *SessionListener) admit(c *Conn) bool {
	code, err := s.check(c.Peer())
	if err == nil {
		c.onClose = func() { s.open.Add(-1) }
		return true
	}
	s.refused.Add(1)
	if s.o.OnRefused != nil {
		s.o.OnRefused(c.Peer(), err)
	}
	_ = c.Send(&Error{Code: code, Text: err.Error()}) // the peer may have disconnected
	c.Close()
	return false
}

// check counts the peer if it may connect.
func (s *SessionListener) check(p peercred.Cred) (code uint8, err error) {
	if !slices.Contains(s.o.UIDs, p.Uid) && !p.InGroups(s.o.GIDs) {
		return ErrCodePermission, fmt.Errorf("uid %d, gid %d: allowed are uids %v, gids %v", p.Uid, p.Gid, s.o.UIDs,
			s.o.GIDs)
	}
	if s.open.Add(1) > MaxSessions {
		s.open.Add(-1)
		return ErrCodeLimit, fmt.Errorf("sessions: more than %d", MaxSessions)
	}
	return 0, nil
}

// Reachable reports whether the socket's file still exists and is the one that was bound.
func (s *SessionListener) Reachable() bool { return s.l.Reachable() }

// Close stops listening and removes the socket. Sessions continue; their owners close them.
func (s *SessionListener) Close() error {
	err := s.l.Close()
	if err == nil {
		close(s.closing)
	}
	return err
}

package ipc

import (
	"errors"
	"fmt"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/ipc/peercred"
)

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

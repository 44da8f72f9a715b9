package ipc

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"

	"github.com/kvagent/kvagent/ipc/peercred"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// Error returns a received ERROR as an error.
func (m *Error) Error() string { return fmt.Sprintf("the peer says (code %d): %s", m.Code, m.Text) }

// ServeHandshake waits for HELLO on an accepted connection and answers with w. It sets w.Version.
// If the client does not speak that version, or no valid HELLO arrives within HandshakeTimeout, it
// sends ERROR and returns the error; the caller closes the connection.
func ServeHandshake(c *Conn, w Welcome) (*Hello, error) {
	msg, fds, err := c.receive(HandshakeTimeout)
	if err != nil {
		return nil, c.refuse(ErrCodeMalformed, err)
	}
	closeAll(fds) // HELLO has none
	hello, ok := msg.(*Hello)
	if !ok {
		return nil, c.refuse(ErrCodeMalformed, fmt.Errorf("%T came before HELLO", msg))
	}
	if Version < hello.MinVersion || Version > hello.MaxVersion {
		return nil, c.refuse(ErrCodeVersion, fmt.Errorf("version: the client speaks %d to %d, allowed is %d",
			hello.MinVersion, hello.MaxVersion, Version))
	}
	w.Version = Version
	c.Served()
	return hello, c.Send(&w)
}

// refuse sends why as an ERROR, if possible, and returns it.
func (c *Conn) refuse(code uint8, why error) error {
	if errors.Is(why, ErrPeerDied) || errors.Is(why, net.ErrClosed) {
		return why
	}
	return errors.Join(why, c.Send(&Error{Code: code, Text: why.Error()}))
}

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
	*socketdir.Listener
	o SessionOptions
}

// ListenSession listens. The error wraps socketdir.ErrInUse if another process serves the path.
// After Close, which removes the socket, sessions continue; their owners close them.
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
	return &SessionListener{l, o}, nil
}

// Accept waits for the next peer that may connect. Other peers get an ERROR with the reason and are
// disconnected. After Close the error is net.ErrClosed.
func (s *SessionListener) Accept() (*Conn, error) {
	for {
		uc, err := s.AcceptUnix()
		if err != nil {
			return nil, err
		}
		c, err := NewConn(uc, true)
		if err != nil {
			continue // the peer is gone, or cannot be identified
		}
		p := c.Peer()
		if slices.Contains(s.o.UIDs, p.Uid) || p.InGroups(s.o.GIDs) {
			return c, nil
		}
		err = fmt.Errorf("uid %d, gid %d: allowed are uids %v, gids %v", p.Uid, p.Gid, s.o.UIDs, s.o.GIDs)
		if s.o.OnRefused != nil {
			s.o.OnRefused(p, err)
		}
		_ = c.Send(&Error{Code: ErrCodePermission, Text: err.Error()}) // the peer may have disconnected
		c.Close()
	}
}

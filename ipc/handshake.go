package ipc

import (
	"context"
	"errors"
	"fmt"
	"net"
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

package admin

import (
	"net"
	"sync"
	"sync/atomic"
)

// MaxConns is how many connections one address of HTTP serves at once; one more is closed. HTTP is for a scraper and for people, and must
// not take the descriptors that engines need.
const MaxConns = 64

// fewConns is a listener that bounds its connections.
type fewConns struct {
	net.Listener
	open atomic.Int64
}

// Accept implements net.Listener.
func (l *fewConns) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.open.Add(1) <= MaxConns {
			return &countedConn{Conn: c, end: sync.OnceFunc(func() { l.open.Add(-1) })}, nil
		}
		l.open.Add(-1)
		_ = c.Close() // one that was not served
	}
}

// countedConn is counted until it is closed.
type countedConn struct {
	net.Conn
	end func()
}

// Close implements net.Conn.
func (c *countedConn) Close() error {
	c.end()
	return c.Conn.Close()
}

package peer

import (
	"errors"
	"io"
	"net"
	"slices"
	"sync"
)

// served is one authenticated connection of a server. Three goroutines work for it, and one for
// each subscription: a reader, a sender of what GETs ask for, and the heartbeats. All have ended
// when run returns.
type served struct {
	*conn
	server *Server
	host   string
	ended  chan struct{} // closed when the connection has ended
	gets   chan request  // GETs and PINs, read and not yet answered

	mu            sync.Mutex
	closed        bool
	subscriptions map[uint32]*subscription
	watchers      sync.WaitGroup
	pins          map[uint32]*pin
	pinned        int64 // bytes of them
}

// request is a GET, or a PIN, that waits to be answered. Its hashes are its own.
type request struct {
	id  uint32
	pin bool
	get
}

// getQueue is how many GETs of a connection may wait. The reader stops at that number, and with it
// the client.
const getQueue = 64

func newServed(s *Server, c *conn) *served {
	v := &served{
		conn: c, server: s, host: host(c.raw), ended: make(chan struct{}), gets: make(chan request, getQueue),
		subscriptions: map[uint32]*subscription{}, pins: map[uint32]*pin{},
	}
	return v
}

// close ends the connection.
func (v *served) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.closed {
		v.closed = true
		close(v.ended)
		v.cut()
	}
}

// run serves the connection to its end.
func (v *served) run() {
	var others sync.WaitGroup
	others.Go(func() { v.heartbeats(v.ended) })
	others.Go(v.answer)
	err := v.receive()
	v.mu.Lock()
	meant := v.closed // by this side
	v.mu.Unlock()
	if errors.Is(err, errMalformed) {
		_ = v.send(kindError, 0, []byte(cut(err.Error(), maxErrorText)))
	}
	v.close()
	others.Wait()
	v.watchers.Wait()
	v.unpinAll()
	switch {
	case meant || errors.Is(err, io.EOF):
	case errors.Is(err, errMalformed):
		v.server.count.add(func(c *ServerStats) { c.Malformed++ })
		v.server.cfg.Log(v.host, "broke the protocol", err)
	default:
		v.server.count.add(func(c *ServerStats) { c.Lost++ })
		if !errors.Is(err, net.ErrClosed) {
			v.server.cfg.Log(v.host, "lost", err)
		}
	}
}

func cut(s string, n int) string { return s[:min(len(s), n)] }

// receive reads what the client sends, until the connection ends.
func (v *served) receive() error {
	for {
		h, err := v.next()
		if err != nil {
			return err
		}
		if !fromClient[h.kind] {
			return malformed("kind %d from a client", h.kind)
		}
		if h.kind == kindSubscribe {
			err = v.takeSubscribe(h)
		} else {
			var p []byte
			if p, err = v.rest(int(h.length)); err == nil { // bounded by maxLength
				err = v.take(h, p)
			}
		}
		if err != nil {
			return err
		}
	}
}

// fromClient has the kinds that a client sends after the handshake.
var fromClient = [kinds]bool{
	kindError: true, kindSubscribe: true, kindGet: true, kindCancel: true, kindDelivered: true, kindPing: true,
	kindPin: true, kindUnpin: true,
}

// takeSubscribe handles a SUBSCRIBE. Its memory is taken from the host's budget before it is read.
func (v *served) takeSubscribe(h header) error {
	held := int64(h.length) + subscriptionBytes
	if !v.server.budget.take(v.host, held) {
		if err := v.skip(int(h.length)); err != nil {
			return err
		}
		return v.refuse(h.id)
	}
	entered := false
	defer func() {
		if !entered {
			v.server.budget.give(v.host, held)
		}
	}()
	p, err := v.rest(int(h.length))
	v.payload = nil // the hashes lie in it
	if err != nil {
		return err
	}
	m, err := parseSubscribe(p)
	if err != nil {
		return err
	}
	marks := int64(m.blocks())
	if !v.server.budget.take(v.host, marks) {
		return v.refuse(h.id)
	}
	held += marks
	entered, err = v.subscribe(h.id, &m, held)
	return err
}

// take handles one frame of another kind. It does not keep p.
func (v *served) take(h header, p []byte) error {
	switch h.kind {
	case kindGet, kindPin:
		m, err := parseGet(slices.Clone(p))
		if err != nil {
			return err
		}
		select {
		case v.gets <- request{h.id, h.kind == kindPin, m}:
			return nil
		case <-v.ended:
			return net.ErrClosed
		}
	case kindUnpin:
		return v.unpin(h.id)
	case kindCancel:
		v.cancel(h.id)
		return nil
	case kindDelivered:
		m, err := parseDelivered(p)
		if err != nil {
			return err
		}
		if s, _, ok := v.server.cfg.Resolve(m.space); ok {
			v.server.cfg.Delivered(s, m.name)
		}
		return nil
	case kindError:
		return malformed("the peer says: %q", p)
	}
	return nil // PING
}

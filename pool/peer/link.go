package peer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// link is the connections to one peer. They live and die together: when one ends, all do.
type link struct {
	client  *Client
	node    *node
	streams []*stream
	dead    chan struct{} // closed when the link has failed
	failing sync.Once

	mu      sync.Mutex
	err     error // why it is dead
	fetches map[uint32]*fetch
	last    uint32 // id given out
}

// dial connects to an address.
func dial(ctx context.Context, c *Client, n *node) (*link, error) {
	l := &link{client: c, node: n, dead: make(chan struct{}), fetches: map[uint32]*fetch{}}
	for range c.cfg.Streams {
		raw, err := c.cfg.Dial(ctx, n.addr)
		if err != nil {
			l.cut()
			return nil, err
		}
		conn, err := dialled(ctx, raw, n.addr, &c.cfg.Auth, c.cfg.Timeout)
		if err != nil {
			_ = raw.Close()
			l.cut()
			return nil, err
		}
		l.streams = append(l.streams, newStream(l, conn))
	}
	return l, nil
}

// start starts the goroutines of a link: a reader and the heartbeats of each stream. Client.Close
// waits for them. Client.mu is held.
func (l *link) start() {
	l.client.links[l] = struct{}{}
	for _, s := range l.streams {
		l.client.reading.Go(s.receive)
		l.client.reading.Go(func() { s.heartbeats(l.dead) })
	}
}

// fail ends the link, once. Its fetches end with the error. The address is suspended before they
// do, so that whoever sees one end does not find the dead link.
func (l *link) fail(err error) { l.failing.Do(func() { l.failNow(err) }) }

func (l *link) failNow(err error) {
	why := lost(l.node.addr, err)
	switch {
	case errors.Is(err, ErrClosed) || l.client.closes():
		why = ErrClosed
	case !errors.Is(err, errIdle):
		l.client.unlink(l, why)
	}
	l.mu.Lock()
	l.err = why
	close(l.dead)
	l.mu.Unlock()
	for _, s := range l.streams {
		if errors.Is(err, errMalformed) {
			_ = s.send(kindError, 0, []byte(cut(err.Error(), maxErrorText)))
		}
		s.cut()
	}
	l.client.forget(l)
}

// cut ends the connections at once, so that nothing of the link waits for the peer.
func (l *link) cut() {
	for _, s := range l.streams {
		s.cut()
	}
}

// reason returns why the link is dead.
func (l *link) reason() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// id returns a number that no open GET or subscription has.
func (l *link) id() uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.last++; l.last == 0 || l.fetches[l.last] != nil; l.last++ {
	}
	return l.last
}

// send writes a frame to the first stream, which carries everything but GETs and BLOCKS. A failed
// write ends the link.
func (l *link) send(k kind, id uint32, payload []byte) error {
	err := l.streams[0].send(k, id, payload)
	if err != nil {
		l.fail(err)
		return l.reason()
	}
	return nil
}

// join registers a fetch, so that announcements reach it, and returns its id.
func (l *link) join(f *fetch) uint32 {
	id := l.id()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fetches[id] = f
	return id
}

func (l *link) leave(id uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.fetches, id)
}

// fetch returns the fetch of an id; nil if it has ended.
func (l *link) fetch(id uint32) *fetch {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fetches[id]
}

// stream is one connection of a link. One goroutine reads it.
type stream struct {
	*conn
	link *link

	asking sync.Mutex // held while an ask is queued and its GET written, so that both orders agree

	mu       sync.Mutex
	asks     []*ask    // in the order of their GETs
	owed     int64     // bytes of them
	deadline time.Time // when they must have arrived; zero: there are none
	over     bool      // nothing is read any more
}

func newStream(l *link, c *conn) *stream { return &stream{conn: c, link: l} }

// ask writes the GET, or PIN, of an ask, and queues it. If the stream has ended the ask has been
// abandoned when ask returns.
func (s *stream) ask(a *ask) {
	s.asking.Lock()
	defer s.asking.Unlock()
	s.mu.Lock()
	over := s.over
	if !over {
		s.asks = append(s.asks, a)
		s.owed += a.bytes()
		if s.deadline.IsZero() {
			s.deadline = time.Now().Add(askTimeouts * s.timeout)
		}
		s.deadline = s.deadline.Add(atLeastRate(a.bytes()))
	}
	s.mu.Unlock()
	if over {
		a.fetch.arrived(a)
		return
	}
	k := kindGet
	if a.pin {
		k = kindPin
	}
	if err := s.send(k, a.id, a.get.encode(nil)); err != nil {
		s.link.fail(err)
	}
}

// load returns the bytes that the stream is owed.
func (s *stream) load() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.owed
}

// oldest returns the ask whose answer is next; nil if there is none.
func (s *stream) oldest() *ask {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.asks) == 0 {
		return nil
	}
	return s.asks[0]
}

func (s *stream) answered(a *ask) {
	s.pop(a)
	a.fetch.arrived(a)
}

// pop takes the oldest ask off the queue.
func (s *stream) pop(a *ask) {
	s.mu.Lock()
	s.asks = append(s.asks[:0], s.asks[1:]...)
	s.owed -= a.bytes()
	if len(s.asks) == 0 {
		s.deadline = time.Time{}
	} else if due := s.latest(); due.Before(s.deadline) {
		s.deadline = due // what came fast does not count for what follows
	}
	s.mu.Unlock()
}

// askTimeouts is how many timeouts a peer has for what it was asked, besides the time of its size.
const askTimeouts = 2

// latest returns when all that is owed must have arrived if it was asked for now. s.mu is held.
func (s *stream) latest() time.Time {
	return time.Now().Add(askTimeouts*s.timeout + atLeastRate(s.owed))
}

// receive reads the stream to its end. All that was asked of it has been answered or abandoned when
// it returns.
func (s *stream) receive() {
	var err error
	for err == nil {
		err = s.receiveOne()
	}
	s.link.fail(err)
	s.mu.Lock()
	s.over = true
	left := s.asks
	s.asks = nil
	s.mu.Unlock()
	for _, a := range left {
		a.fetch.arrived(a)
	}
}

// limit has what is read next arrive in the time of what is owed.
func (s *stream) limit() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.due = s.deadline
}

func (s *stream) receiveOne() error {
	s.limit()
	h, err := s.next()
	if err != nil {
		return err
	}
	s.limit() // something may have been asked meanwhile
	switch h.kind {
	case kindBlocks:
		return s.receiveBlocks(h)
	case kindPlaces:
		return s.receivePlaces(h)
	case kindHave, kindEnd, kindPing, kindError:
	default:
		return malformed("kind %d from a server", h.kind)
	}
	p, err := s.rest(int(h.length))
	if err != nil {
		return err
	}
	switch h.kind {
	case kindHave:
		runs, err := parseHave(p)
		if f := s.link.fetch(h.id); f != nil && err == nil {
			err = f.announced(runs)
		}
		return err
	case kindEnd:
		e, tokens, err := parseEnd(p)
		if f := s.link.fetch(h.id); f != nil && err == nil {
			f.ended(e, tokens)
		}
		return err
	case kindError:
		return fmt.Errorf("the peer says: %q", p)
	}
	return nil // PING
}

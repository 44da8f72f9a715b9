package peer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvagent/kvagent/backoff"
)

// node is what a client has of one address. Client.mu guards it.
type node struct {
	addr    string
	users   int       // calls at work
	used    time.Time // when the last one ended
	link    *link     // nil: not connected
	idle    *time.Timer
	giveUp  context.CancelFunc // of the attempt to connect; nil: none
	decided chan struct{}      // closed when that attempt has ended
	breaker breaker
	reads   breaker // of one-sided reads
}

// breaker suspends an address after failures. Client.mu guards it.
type breaker struct {
	backoff backoff.Backoff // its pause is 0 unless the address is suspended
	until   time.Time
	err     error
	opened  uint64
}

func (b *breaker) failed(err error, cfg *ClientConfig) {
	b.backoff.First, b.backoff.Last = cfg.BreakFirst, cfg.BreakLast
	b.until = time.Now().Add(b.backoff.Next())
	b.err = err
	b.opened++
}

func (b *breaker) worked() {
	b.backoff.Reset()
	b.err = nil
}

// suspends reports whether the last call failed.
func (b *breaker) suspends() bool { return b.backoff.Pause() > 0 }

// makeRoom forgets the address that is unused longest, if there are as many as allowed. It returns
// false if all are in use.
func (c *Client) makeRoom() bool {
	if len(c.nodes) < c.cfg.Peers {
		return true
	}
	var oldest *node
	for _, n := range c.nodes {
		if n.users == 0 && (oldest == nil || n.used.Before(oldest.used)) {
			oldest = n
		}
	}
	if oldest == nil {
		return false
	}
	if l := oldest.link; l != nil {
		oldest.link = nil
		c.reading.Go(func() { l.fail(errIdle) })
	}
	if oldest.idle != nil {
		oldest.idle.Stop()
	}
	delete(c.nodes, oldest.addr)
	return true
}

// link returns the connections to an address, which it makes if necessary. One call at a time
// connects; the others wait for it, or are refused if the address has failed before.
func (c *Client) link(ctx context.Context, n *node) (*link, error) {
	for {
		c.mu.Lock()
		switch {
		case c.closed:
			c.mu.Unlock()
			return nil, ErrClosed
		case n.link != nil:
			defer c.mu.Unlock()
			return n.link, nil
		case n.breaker.suspends() && (n.giveUp != nil || time.Now().Before(n.breaker.until)):
			defer c.mu.Unlock()
			return nil, fmt.Errorf("%w: %w", ErrSuspended, n.breaker.err)
		case n.giveUp == nil:
			return c.connect(ctx, n)
		}
		decided := n.decided
		c.mu.Unlock()
		select {
		case <-decided:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// connect makes the connections to an address. It is called with the lock, and releases it.
func (c *Client) connect(ctx context.Context, n *node) (*link, error) {
	within, giveUp := context.WithTimeout(ctx, c.cfg.Timeout)
	defer giveUp()
	n.giveUp, n.decided = giveUp, make(chan struct{})
	c.mu.Unlock()
	l, err := dial(within, c, n)
	c.mu.Lock()
	defer c.mu.Unlock()
	n.giveUp = nil
	close(n.decided)
	switch {
	case err == nil && !c.closed:
		n.link = l
		l.start()
		return l, nil
	case err == nil:
		l.cut()
		return nil, ErrClosed
	case c.closed:
		return nil, ErrClosed
	case ctx.Err() != nil: // the caller's end says nothing about the peer
		return nil, ctx.Err()
	}
	err = lost(n.addr, err)
	n.breaker.failed(err, &c.cfg)
	c.cfg.Log(n.addr, "cannot connect", err)
	return nil, err
}

// lost wraps an error as ErrLost, unless it is a refusal by authentication.
func lost(addr string, err error) error {
	if errors.Is(err, ErrAuth) || errors.Is(err, ErrLost) {
		return fmt.Errorf("%s: %w", addr, err)
	}
	return fmt.Errorf("%w: %s: %w", ErrLost, addr, err)
}

// errIdle ends connections that nothing uses.
var errIdle = errors.New("idle")

// closeIdle closes a link that nothing has used for a while.
func (c *Client) closeIdle(n *node, l *link) {
	c.mu.Lock()
	if n.users > 0 || n.link != l || c.closed {
		c.mu.Unlock()
		return
	}
	n.link = nil
	c.mu.Unlock()
	l.fail(errIdle)
}

// unlink takes a failed link from its address.
func (c *Client) unlink(l *link, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.node.link != l || c.closed {
		return // it was closed on purpose
	}
	l.node.link = nil
	if l.node.users > 0 { // a peer that ends while nothing is asked of it may be back by then
		l.node.breaker.failed(err, &c.cfg)
		c.cfg.Log(l.node.addr, "lost", err)
	}
}

// Stats returns the state and the counters.
func (c *Client) Stats() ClientStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := c.count
	out.Peers = []AddressStats{}
	for _, n := range c.nodes {
		p := AddressStats{Peer: n.addr, Fetches: n.users, Opened: n.breaker.opened, State: "idle"}
		if n.breaker.err != nil {
			p.Error = n.breaker.err.Error()
		}
		switch {
		case n.link != nil:
			p.State = "up"
		case n.breaker.suspends() && n.giveUp != nil:
			p.State = "half-open"
		case n.breaker.suspends() && time.Now().Before(n.breaker.until):
			p.State = "open"
		}
		out.Peers = append(out.Peers, p)
	}
	slices.SortFunc(out.Peers, func(a, b AddressStats) int { return strings.Compare(a.Peer, b.Peer) })
	return out
}

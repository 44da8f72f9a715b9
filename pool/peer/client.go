package peer

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Client fetches blocks from other agents into a local pool. All its methods may be called
// concurrently.
type Client struct {
	cfg      ClientConfig
	reading  sync.WaitGroup // goroutines of links
	pulling  chan struct{}  // has an element for each one-sided read
	fetching sync.WaitGroup // calls of Fetch and Delivered
	stored   atomic.Uint64  // blocks of all fetches

	mu     sync.Mutex
	closed bool
	nodes  map[string]*node
	links  map[*link]struct{} // that have not ended
	count  ClientStats
}

// NewClient returns a client without connections: Fetch makes them, and keeps them for the next
// one.
func NewClient(cfg ClientConfig) (*Client, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	return &Client{
		cfg: cfg, nodes: map[string]*node{}, links: map[*link]struct{}{},
		pulling: make(chan struct{}, maxPulling),
	}, nil
}

// Fetch stores the blocks of a request that the peer at addr has, or gets while the transfer is
// open. It returns when everything that the peer announced has been stored or has failed, and the
// transfer is complete, unknown, expired or was waited for long enough; when ctx ends; or when the
// peer is lost, at most Timeout after its last byte. No slot is reserved when it returns.
//
// The error is nil if the peer said how the fetch ended. Otherwise it wraps ctx's error, ErrLost,
// ErrAuth, ErrSuspended, ErrBusy, ErrClosed or allow.ErrRefused, or names an invalid field of the
// request. The result counts every block in any case.
//
// Stored calls, from any goroutine and never two at once, with the blocks and bytes that a commit
// made visible. It must not block, and may be nil.
func (c *Client) Fetch(ctx context.Context, addr string, r Request, stored func(blocks int, bytes int64)) (
	Result, error,
) {
	if err := r.check(); err != nil {
		return Result{}, err
	}
	start := time.Now()
	f := newFetch(c, &r, stored)
	n, err := c.begin(addr, true)
	if err == nil {
		err = f.run(ctx, n)
		f.result.Took = time.Since(start)
		c.end(n, f, err)
	}
	return f.finish(err), err
}

// Delivered tells the peer at addr that a transfer was delivered, or is not wanted any more. It is
// no fetch: its caller bounds how many run.
func (c *Client) Delivered(ctx context.Context, addr string, space pool.Fingerprint, name string) error {
	n, err := c.begin(addr, false)
	if err != nil {
		return err
	}
	defer c.end(n, nil, nil)
	l, err := c.link(ctx, n)
	if err != nil {
		return err
	}
	return l.send(kindDelivered, 0, (&delivered{space: space, name: name}).encode())
}

// Close ends all fetches and connections, and returns when no slot is reserved or written any more.
// It waits for no peer.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return ErrClosed
	}
	c.closed = true
	links := slices.Collect(maps.Keys(c.links))
	for _, n := range c.nodes {
		if n.giveUp != nil {
			n.giveUp()
		}
	}
	c.mu.Unlock()
	for _, l := range links {
		l.cut()
		l.fail(ErrClosed)
	}
	c.fetching.Wait()
	c.reading.Wait()
	return nil
}

func (c *Client) closes() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// forget removes a link that has ended.
func (c *Client) forget(l *link) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.links, l)
}

// begin counts a call for an address, which is a fetch or a Delivered.
func (c *Client) begin(addr string, fetch bool) (*node, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, ErrClosed
	}
	if err := c.cfg.Allow.Check(addr); err != nil {
		c.count.Refused++
		c.cfg.Log(addr, "refused: the host is not allowed", err)
		return nil, err
	}
	n := c.nodes[addr]
	if fetch && c.count.Fetches >= c.cfg.Fetches || n == nil && !c.makeRoom() {
		c.count.Refused++
		return nil, ErrBusy
	}
	if n == nil {
		n = &node{addr: addr}
		c.nodes[addr] = n
	}
	if fetch {
		c.count.Fetches++
	}
	n.users++
	if n.idle != nil {
		n.idle.Stop()
		n.idle = nil
	}
	c.fetching.Add(1)
	return n, nil
}

// end counts what became of a call; f is nil if it was not a fetch.
func (c *Client) end(n *node, f *fetch, err error) {
	defer c.fetching.Done()
	var r Result
	if f != nil {
		r = f.finish(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if f != nil {
		c.count.Fetches--
	}
	n.users--
	n.used = time.Now()
	if n.users == 0 && n.link != nil {
		l := n.link
		n.idle = time.AfterFunc(c.cfg.Idle, func() { c.closeIdle(n, l) })
	}
	if f == nil {
		return
	}
	if errors.Is(err, ErrSuspended) {
		c.count.Suspended++
	}
	c.count.Done[r.End]++
	for i, failed := range r.Failed {
		c.count.Failed[i] += uint64(failed)
	}
	c.count.Blocks, c.count.Bytes = c.count.Blocks+uint64(r.Blocks), c.count.Bytes+uint64(r.Bytes)
	c.count.Seconds += r.Took.Seconds()
	if err == nil {
		n.breaker.worked()
	}
}

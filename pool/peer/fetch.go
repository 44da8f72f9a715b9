package peer

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvagent/kvagent/backoff"
	"github.com/kvagent/kvagent/pool"
)

// fetch is one call of Client.Fetch. Its caller's goroutine reserves slots and asks for blocks; the
// readers of the streams report what was announced and what has arrived.
type fetch struct {
	client  *Client
	request *Request
	total   int // blocks
	stored  func(blocks int, bytes int64)
	wake    chan struct{} // has room for one
	result  Result        // of run, which writes it last

	committing sync.Mutex // held while blocks are committed and reported

	mu      sync.Mutex
	seen    []bool  // announced
	queue   []run   // announced and not asked for
	later   delayed // announced, and not to be had when they were to be reserved
	end     End     // from the peer; 0: not yet
	tokens  uint32
	owed    int64   // bytes asked for
	parts   int     // blocks reserved and not settled
	sizes   []int64 // by group of the request: bytes of a block with all shards; 0: not learned
	largest []int64 // and of its largest shard
	outcome Result  // counts so far
}

// part is a block that is being fetched.
type part struct {
	slots  []pool.Slot // by shard
	has    []bool      // by shard: it is reserved
	left   int         // shards asked for
	failed bool
	reason Reason // why it failed
	busy   bool   // another job is storing some shard
	again  bool   // it is tried later, and not counted now
}

func newFetch(c *Client, r *Request, stored func(int, int64)) *fetch {
	f := &fetch{
		client: c, request: r, stored: stored, wake: make(chan struct{}, 1),
		sizes: make([]int64, len(r.Groups)), largest: make([]int64, len(r.Groups)),
		later: delayed{pause: backoff.Backoff{First: firstDelay, Last: lastDelay}},
	}
	for i := range r.Groups {
		f.total += r.Groups[i].Hashes.N
	}
	f.seen = make([]bool, f.total)
	if f.stored == nil {
		f.stored = func(int, int64) {}
	}
	return f
}

// run fetches over the connections of an address.
func (f *fetch) run(ctx context.Context, n *node) error {
	l, err := f.client.link(ctx, n)
	if err != nil {
		return err
	}
	id := l.join(f)
	defer l.leave(id)
	if err = l.send(kindSubscribe, id, f.subscribe().encode()); err != nil {
		return err
	}
	bound := time.NewTimer(f.request.Wait + 2*f.client.cfg.Timeout)
	defer bound.Stop()
	for {
		switch over, ended := f.state(); {
		case over && f.abandoned() == 0:
			return nil // whatever has happened since
		case ctx.Err() != nil:
			if !ended {
				_ = l.send(kindCancel, id, nil)
			}
			f.drain()
			return ctx.Err()
		case l.reason() != nil:
			f.drain()
			return l.reason()
		}
		if b, ok := f.next(); ok {
			f.ask(l, b)
			continue
		}
		due, again := f.retry()
		if again {
			continue
		}
		select {
		case <-f.wake:
		case <-due:
		case <-ctx.Done():
		case <-l.dead:
		case <-bound.C:
			if _, ended := f.state(); !ended {
				l.fail(errors.New("it did not end the fetch in time"))
			}
		}
	}
}

func (f *fetch) subscribe() *subscribe {
	r := f.request
	m := &subscribe{wait: r.Wait, early: r.Early, space: r.Space, name: r.Name}
	for i := range r.Groups {
		m.groups = append(m.groups, subscribeGroup{r.Groups[i].Group, r.Groups[i].Hashes})
	}
	return m
}

// state reports whether nothing more is to be done, and whether the peer has said so for its part.
func (f *fetch) state() (over, ended bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.end != 0 && len(f.queue) == 0 && len(f.later.blocks) == 0 && f.parts == 0, f.end != 0
}

// abandoned returns how many blocks were asked for and did not arrive. The link has failed then.
func (f *fetch) abandoned() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.outcome.Failed[Abandoned]
}

// drain waits until what was asked for has arrived or was abandoned: the readers may write to its
// slots until then. A peer that is too slow is lost.
func (f *fetch) drain() {
	for {
		f.mu.Lock()
		parts := f.parts
		f.mu.Unlock()
		if parts == 0 {
			return
		}
		<-f.wake
	}
}

// announced queues blocks that the peer has. An error breaks the protocol.
func (f *fetch) announced(runs []run) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range runs {
		if int64(r.first)+int64(r.count) > int64(f.total) {
			return malformed("HAVE: block %d of %d", r.first+r.count-1, f.total)
		}
		for i := r.first; i < r.first+r.count; i++ {
			if f.seen[i] {
				return malformed("HAVE: block %d twice", i)
			}
			f.seen[i] = true
		}
	}
	if f.end != 0 {
		return malformed("HAVE after END")
	}
	f.queue = append(f.queue, runs...)
	f.signal()
	return nil
}

// ended records the peer's END.
func (f *fetch) ended(e End, tokens uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.end, f.tokens = e, tokens
	f.signal()
}

func (f *fetch) signal() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

package peer

import (
	"context"
	"errors"
	"sync"
	"time"

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
	seen    []bool // announced
	queue   []run  // announced and not asked for
	end     End    // from the peer; 0: not yet
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
}

func newFetch(c *Client, r *Request, stored func(int, int64)) *fetch {
	f := &fetch{
		client: c, request: r, stored: stored, wake: make(chan struct{}, 1),
		sizes: make([]int64, len(r.Groups)), largest: make([]int64, len(r.Groups)),
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
		case ctx.Err() != nil:
			if !ended {
				_ = l.send(kindCancel, id, nil)
			}
			f.drain(l)
			return ctx.Err()
		case l.reason() != nil:
			f.drain(l)
			return l.reason()
		case over:
			return nil
		}
		if b, ok := f.next(); ok {
			f.ask(l, b)
			continue
		}
		select {
		case <-f.wake:
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
	return f.end != 0 && len(f.queue) == 0 && f.parts == 0, f.end != 0
}

// drain waits until what was asked for has arrived or was abandoned: the readers may write to its
// slots until then. A peer that takes too long with it is lost.
func (f *fetch) drain(l *link) {
	bound := time.NewTimer(drainTimeouts * f.client.cfg.Timeout)
	defer bound.Stop()
	for {
		f.mu.Lock()
		parts := f.parts
		f.mu.Unlock()
		if parts == 0 {
			return
		}
		select {
		case <-f.wake:
		case <-bound.C:
			l.fail(errors.New("it did not send what was asked for in time"))
		}
	}
}

// drainTimeouts is how many timeouts a peer has to send what was asked for before the fetch was
// cancelled.
const drainTimeouts = 4

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

// stretch is blocks of one group that are asked for together.
type stretch struct {
	group    int // in the request
	from, to int // in the group
}

// next takes the next blocks off the queue, if the window has room for them.
func (f *fetch) next() (b stretch, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.queue) == 0 {
		return b, false
	}
	r := &f.queue[0]
	at := int(r.first)
	for ; at >= f.request.Groups[b.group].Hashes.N; b.group++ {
		at -= f.request.Groups[b.group].Hashes.N
	}
	n := 1 // until the sizes are known
	if size := f.sizes[b.group]; size > 0 {
		n = int(min(max(f.client.cfg.BatchBytes/f.largest[b.group], 1), MaxBatch))
		if room := (f.client.cfg.WindowBytes - f.owed) / size; int64(n) > room {
			if n = int(max(room, 0)); n == 0 && f.parts == 0 {
				n = 1
			}
		}
	} else if f.parts > 0 {
		n = 0
	}
	n = min(n, int(r.count), f.request.Groups[b.group].Hashes.N-at)
	if n == 0 {
		return b, false
	}
	b.from, b.to = at, at+n
	r.first, r.count = r.first+uint32(n), r.count-uint32(n)
	if r.count == 0 {
		f.queue = f.queue[1:]
	}
	return b, true
}

// ask reserves slots for some blocks and asks for what they lack.
func (f *fetch) ask(l *link, b stretch) {
	parts := f.reserve(b)
	g := &f.request.Groups[b.group]
	var asks []*ask
	for shard := range f.request.Shards {
		a := &ask{fetch: f, get: get{space: f.request.Space, group: g.Group, shard: uint8(shard)}}
		var blob []byte
		for i, p := range parts {
			if p.failed || !p.has[shard] {
				continue
			}
			p.left++
			a.parts, a.result = append(a.parts, p), append(a.result, cancelled)
			a.get.length = p.slots[shard].Len
			blob = append(blob, g.Hashes.At(b.from+i)...)
		}
		if a.get.hashes = pool.Chain(blob, g.Hashes.Len); len(a.parts) > 0 {
			asks = append(asks, a)
		}
	}
	var done []*part
	f.mu.Lock()
	f.parts += len(parts)
	for _, p := range parts {
		if p.left == 0 {
			done = append(done, p)
		}
	}
	for _, a := range asks {
		f.owed += a.bytes()
	}
	f.mu.Unlock()
	f.settle(done)
	for _, a := range asks {
		a.id = l.id()
		l.leastLoaded().ask(a)
	}
}

// leastLoaded returns the stream that is owed least.
func (l *link) leastLoaded() *stream {
	best, load := l.streams[0], l.streams[0].load()
	for _, s := range l.streams[1:] {
		if other := s.load(); other < load {
			best, load = s, other
		}
	}
	return best
}

// reserve reserves the shards of some blocks that are not stored here.
func (f *fetch) reserve(b stretch) []*part {
	r, n := f.request, b.to-b.from
	g := &r.Groups[b.group]
	parts := make([]*part, n)
	for i := range parts {
		parts[i] = &part{slots: make([]pool.Slot, r.Shards), has: make([]bool, r.Shards)}
	}
	batch := pool.Batch{
		Space: r.ID, Group: g.Group, Epoch: r.Epoch, Parent: g.Parent, Hashes: g.Hashes.Slice(b.from, b.to),
		Status: make([]pool.Status, n), Slots: make([]pool.Slot, n),
	}
	if b.from > 0 {
		batch.Parent = g.Hashes.At(b.from - 1)
	}
	size, largest := int64(0), int64(0)
	for shard := range r.Shards {
		batch.Shard = uint8(shard)
		f.client.cfg.Slots.Reserve(&batch)
		for i, p := range parts {
			switch batch.Status[i] {
			case pool.OK:
				p.slots[shard], p.has[shard] = batch.Slots[i], true
				largest = max(largest, int64(batch.Slots[i].Len))
			case pool.Exists, pool.InProgress:
			default:
				p.failed, p.reason = true, reasonOf(batch.Status[i])
			}
		}
		size += largest
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if size > f.sizes[b.group] {
		f.sizes[b.group], f.largest[b.group] = size, largest
	}
	return parts
}

// arrived takes an ask back from its stream.
func (f *fetch) arrived(a *ask) {
	var done []*part
	f.mu.Lock()
	for i, p := range a.parts {
		if status := a.result[i]; status != pool.OK && !p.failed {
			p.failed = true
			switch status {
			case cancelled:
				p.reason = Abandoned
			case badPage:
				p.reason = BadPage
			default:
				p.reason = reasonOf(status)
			}
		}
		if p.left--; p.left == 0 {
			done = append(done, p)
		}
	}
	f.mu.Unlock()
	f.settle(done)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.owed -= a.bytes()
	f.signal()
}

// settle commits blocks of which all shards have arrived, frees those that failed, and counts both.
func (f *fetch) settle(done []*part) {
	if len(done) == 0 {
		return
	}
	var slots []pool.Slot
	var status []pool.Status
	for _, p := range done {
		for shard, has := range p.has {
			if !has {
				continue
			}
			s := pool.OK
			if p.failed {
				s = pool.Busy
			}
			slots, status = append(slots, p.slots[shard]), append(status, s)
		}
	}
	f.committing.Lock()
	defer f.committing.Unlock()
	if len(slots) > 0 {
		f.client.cfg.Slots.Commit(slots, f.request.Epoch, status)
	}
	var of Result
	for _, p := range done {
		bytes, reserved := int64(0), false
		for shard, has := range p.has {
			if !has {
				continue
			}
			if status[0] != pool.OK && !p.failed {
				p.failed, p.reason = true, reasonOf(status[0])
			}
			bytes, reserved = bytes+int64(p.slots[shard].Len), true
			status = status[1:]
		}
		switch {
		case p.failed:
			of.Failed[p.reason]++
		case !reserved:
			of.Failed[Had]++
		default:
			of.Blocks, of.Bytes = of.Blocks+1, of.Bytes+bytes
		}
	}
	if of.Blocks > 0 {
		f.stored(of.Blocks, of.Bytes)
	}
	f.add(&of, len(done))
}

// add adds the outcome of blocks.
func (f *fetch) add(of *Result, parts int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.parts -= parts
	f.outcome.Blocks, f.outcome.Bytes = f.outcome.Blocks+of.Blocks, f.outcome.Bytes+of.Bytes
	for i := range of.Failed {
		f.outcome.Failed[i] += of.Failed[i]
	}
	f.signal()
}

// finish returns the result of a fetch that ended with an error, or without one.
func (f *fetch) finish(err error) Result {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.outcome
	r.End, r.Tokens, r.Took = f.end, f.tokens, f.result.Took
	switch {
	case err == nil:
	case err == context.Canceled || err == context.DeadlineExceeded: // the caller's own, as it is
		r.End = EndCancelled
	default:
		r.End = EndLost
	}
	counted := r.Blocks
	for _, n := range r.Failed {
		counted += n
	}
	r.Failed[NotStored] += f.total - counted
	return r
}

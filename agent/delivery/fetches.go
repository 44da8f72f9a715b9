package delivery

import (
	"bytes"
	"container/list"
	"context"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Request is what a fetch brings: the blocks of a transfer that this agent lacks.
type Request struct {
	Peer        string // host:port of the agent that has the transfer
	Name        string
	Early       bool // that agent may not have heard of it yet
	Fingerprint pool.Fingerprint
	Space       pool.SpaceID
	Epoch       uint32 // of the space; blocks are not stored after a reset
	Shards      int
	Chains      []Chain // by ascending group
}

// Chain is the blocks of one group in a request.
type Chain struct {
	Group  uint8
	Parent []byte // hash of the block before the first; empty at the start of the prompt
	Hashes pool.Hashes
}

// lacking appends the blocks of a group, those of h after its first own, that an index has not, in
// memory of their own: at most left, from which it takes them.
func (r *Request) lacking(index pool.Index, group uint8, h pool.Hashes, own int, windowed bool, left *int) {
	from := own
	if !windowed {
		from += index.Prefix(r.Space, group, h.Slice(from, h.N))
	}
	to := min(h.N, from+*left)
	if from >= to {
		return
	}
	*left -= to - from
	c := Chain{Group: group}
	if from > 0 {
		c.Parent = bytes.Clone(h.At(from - 1))
	}
	blob := make([]byte, 0, (to-from)*h.Len)
	for n := from; n < to; n++ {
		blob = append(blob, h.At(n)...)
	}
	c.Hashes = pool.Chain(blob, h.Len)
	r.Chains = append(r.Chains, c)
}

// bytes returns the size of a request's hashes.
func (r *Request) bytes() (n int64) {
	for i := range r.Chains {
		n += int64(r.Chains[i].Hashes.N) * int64(r.Chains[i].Hashes.Len)
	}
	return n
}

// fetch is a fetch that runs, or has ended and is remembered, so that the look-ups after it do not
// start it again. Table.mu guards it.
type fetch struct {
	key       Key
	request   *Request
	sessions  map[uint64]struct{} // that asked for it; 0 stands for look-ups without one
	until     time.Time           // when it is no longer wanted or remembered
	place     *list.Element       // in Table.mu.asked
	cancel    context.CancelFunc
	over      bool
	ended     chan struct{} // closed once it is over
	delivered bool          // the receiver has said so
}

// leave records that a session ended, and ends a fetch that no other has asked for.
func (f *fetch) leave(session uint64) {
	if _, asked := f.sessions[session]; !asked {
		return
	}
	delete(f.sessions, session)
	if len(f.sessions) == 0 {
		f.cancel()
	}
}

// Fetching reports whether a transfer's blocks are being fetched from a peer, and whether a fetch
// of them is known: one that has ended is not started again.
func (t *Table) Fetching(s pool.SpaceID, name []byte, peer string, session uint64) (running, known bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.mu.fetches[Key{s, string(name)}]
	if f == nil || f.request.Peer != peer && f.over {
		return false, false
	}
	now := t.cfg.Now()
	if !now.Before(f.until) {
		t.forgetLocked(f)
		return false, false
	}
	f.until = now.Add(t.cfg.TTL)
	t.mu.asked.MoveToBack(f.place)
	if running = !f.over && !f.delivered; running {
		f.sessions[session] = struct{}{}
	}
	return running, true
}

// Start starts a fetch for a session, unless another look-up has done so meanwhile. It returns
// whether one runs. A request without chains is over at once, and remembered like others.
func (t *Table) Start(r *Request, session uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := Key{r.Space, r.Name}
	old := t.mu.fetches[key]
	if old != nil && (!old.over || old.request.Peer == r.Peer) {
		return !old.over && !old.delivered
	}
	if old != nil {
		t.forgetLocked(old)
	}
	runs := len(r.Chains) > 0
	full := t.mu.fetching >= MaxFetches || t.mu.hashes+r.bytes() > MaxFetchBytes
	if t.cfg.Fetch == nil || t.mu.closed || runs && full {
		t.mu.count.FetchesRefused++
		return false
	}
	if oldest := t.mu.asked.Front(); oldest != nil && len(t.mu.fetches) >= maxRecords {
		t.forgetLocked(oldest.Value.(*fetch))
	}
	ctx, cancel := context.WithCancel(context.Background())
	f := &fetch{
		key: key, request: r, sessions: map[uint64]struct{}{session: {}}, until: t.cfg.Now().Add(t.cfg.TTL),
		cancel: cancel, over: !runs, ended: make(chan struct{}),
	}
	f.place = t.mu.asked.PushBack(f)
	t.mu.fetches[key] = f
	if !runs {
		close(f.ended)
		return false
	}
	t.mu.fetching++
	t.mu.hashes += r.bytes()
	t.mu.count.Fetches++
	t.running.Go(func() { t.run(ctx, f) })
	return true
}

func (t *Table) run(ctx context.Context, f *fetch) {
	defer f.cancel()
	err := t.cfg.Fetch(ctx, f.request)
	t.mu.Lock()
	defer t.mu.Unlock()
	f.over = true
	close(f.ended)
	t.mu.hashes -= f.request.bytes()
	f.request.Chains = nil // a record needs no hashes
	t.mu.fetching--
	switch {
	case ctx.Err() != nil:
		t.mu.count.FetchesCancelled++
	case err != nil:
		t.mu.count.FetchesFailed++
	}
}

// forgetLocked forgets a fetch, which ends if it runs.
func (t *Table) forgetLocked(f *fetch) {
	f.cancel()
	t.mu.asked.Remove(f.place)
	if t.mu.fetches[f.key] == f {
		delete(t.mu.fetches, f.key)
	}
}

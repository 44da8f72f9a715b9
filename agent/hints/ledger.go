package hints

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Memory is the pool as a ledger uses it.
type Memory interface {
	pool.Advised
	Unpin(refs []pool.Ref)
	Epoch(s pool.SpaceID) uint32
}

// Config configures a ledger.
type Config struct {
	Memory    Memory
	Capacity  int64 // bytes of memory
	PinBudget int64 // bytes that may be pinned
	Ranks     bool  // the policy of eviction follows advice
	// Raise brings what only tiers have of a chain into memory. It returns when nothing more comes
	// or ctx ends. nil: there are no tiers.
	Raise func(ctx context.Context, s pool.SpaceID, group uint8, h pool.Hashes)
	// Fetch starts to copy the blocks that this agent lacks from another, under a name. ended is
	// closed when that is over. It does not wait. nil: no other agent can be asked.
	Fetch func(s pool.SpaceID, name, peer string, chains []Chain) (ended <-chan struct{}, err error)
	Now   func() time.Time
}

// Ledger carries out hints. Its methods may be called from any goroutine; none waits for I/O.
// Expire has to be called from time to time.
type Ledger struct {
	c       Config
	queue   chan *wish // of prefetches
	running sync.WaitGroup
	ending  <-chan struct{}
	stop    context.CancelFunc

	mu struct { // taken before the pool's locks
		sync.Mutex
		closed   bool
		sessions sessions
		pins     pins
		wishes   wishes                  // that go on
		accounts map[sessionKey]*account // of sessions with wishes
		pending  int                     // wishes, fetches and prefetches
		blocks   int                     // of them
		retained int64                   // bytes
		receipts []*Receipt              // the last, oldest first
		count    Counts
	}
}

// account is what the wishes of one session take, or those of all requests of a space without one.
type account struct {
	blocks   int
	retained int64 // bytes
	retains  []*wish
}

// wish is an action that goes on.
type wish struct {
	action   Action
	space    pool.SpaceID
	epoch    uint32
	session  sessionKey
	part     uint32  // of the hint
	chains   []Chain // owned
	blocks   int     // of chains
	retained int64   // bytes accounted to the session
	before   int     // blocks that were stored before a prefetch or a fetch
	later    func(Receipt)
	at       time.Time // when it is over
	receipt  *Receipt
	index    int // in wishes
}

// Report is the state and the counters of a ledger.
type Report struct {
	PinnedBlocks int   `json:"pinned_blocks"`
	PinnedBytes  int64 `json:"pinned_bytes" metric:"hint_bytes{kind=pinned}"`
	PinBudget    int64 `json:"pinned_bytes_limit"`
	Retained     int64 `json:"retained_bytes" metric:"hint_bytes{kind=retained}"`
	Sessions     int   `json:"sessions"` // remembered
	Pending      int   `json:"pending"`  // actions that go on
	Counts
}

// Counts are the counters of a ledger since its start.
type Counts struct {
	Ended    uint64 `json:"ended" metric:"hints_total{state=ended}"` // requests whose end was told
	Accepted uint64 `json:"accepted" metric:"hints_total{state=accepted}"`
	Clipped  uint64 `json:"clipped" metric:"hints_total{state=clipped}"`
	Deferred uint64 `json:"deferred" metric:"hints_total{state=deferred}"`
	Rejected uint64 `json:"rejected" metric:"hints_total{state=rejected}"`
	Missing  uint64 `json:"missing" metric:"hints_total{state=missing}"`

	Helped  uint64 `json:"blocks_helped" metric:"hint_blocks_total{outcome=helped}"`
	InVain  uint64 `json:"blocks_in_vain" metric:"hint_blocks_total{outcome=in_vain}"`
	Dropped uint64 `json:"blocks_dropped" metric:"hint_blocks_total{outcome=dropped}"`
	Ignored uint64 `json:"ignored"` // hints of sessions without an open space
}

// New makes an empty ledger. Close ends it.
func New(c Config) *Ledger {
	if c.Now == nil {
		c.Now = time.Now
	}
	l := &Ledger{c: c, queue: make(chan *wish, MaxWaiting)}
	l.mu.sessions, l.mu.pins = newSessions(), newPins()
	l.mu.accounts = map[sessionKey]*account{}
	ctx, stop := context.WithCancel(context.Background())
	l.ending, l.stop = ctx.Done(), stop
	l.running.Go(func() { l.prefetch(ctx) })
	return l
}

// Close ends all actions and pins, and waits for the ledger's goroutine.
func (l *Ledger) Close() {
	l.mu.Lock()
	l.mu.closed = true
	refs := l.mu.pins.take(func(*pin) bool { return true })
	l.mu.wishes = nil
	l.mu.Unlock()
	l.c.Memory.Unpin(refs)
	l.stop()
	l.running.Wait()
}

// Report returns the ledger's state and counters.
func (l *Ledger) Report() Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Report{
		PinnedBlocks: len(l.mu.pins.byRef), PinnedBytes: l.mu.pins.bytes, PinBudget: l.c.PinBudget,
		Retained: l.mu.retained, Sessions: len(l.mu.sessions.byKey),
		Pending: l.mu.pending, Counts: l.mu.count,
	}
}

// Receipts returns the last receipts, the newest first.
func (l *Ledger) Receipts() []Receipt {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]Receipt, 0, len(l.mu.receipts))
	for i := len(l.mu.receipts) - 1; i >= 0; i-- {
		out = append(out, *l.mu.receipts[i])
	}
	return out
}

// Told carries out a hint and returns a receipt for each of its actions. It retains nothing of the
// hint.
func (l *Ledger) Told(h *Hint) []Receipt {
	if h.Finish != pool.FinishUnknown || h.Output > 0 {
		for i := range h.Chains {
			c := &h.Chains[i]
			l.c.Memory.Advise(h.Space, c.Group, c.Hashes, pool.Advice{Finish: h.Finish, Output: h.Output}, 0)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.closed {
		return nil
	}
	if h.Finish != pool.FinishUnknown {
		l.mu.count.Ended++
	}
	l.mu.sessions.note(h)
	out := make([]Receipt, len(h.Actions))
	for i := range h.Actions {
		out[i] = *l.doLocked(h, &h.Actions[i])
	}
	return out
}

// ErrNoSession is returned for a session of which nothing is remembered.
var ErrNoSession = errors.New("session: nothing is remembered of it")

// ToldOf carries out actions on what is remembered of a session.
func (l *Ledger) ToldOf(name string, actions []Action) ([]Receipt, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	found := l.mu.sessions.named(name)
	if l.mu.closed || len(found) == 0 {
		return nil, ErrNoSession
	}
	var out []Receipt
	for _, s := range found {
		h := &Hint{Space: s.key.space, Session: name, Chains: s.chains}
		for i := range actions {
			out = append(out, *l.doLocked(h, &actions[i]))
		}
	}
	return out, nil
}

// doLocked carries out one action and records its receipt.
func (l *Ledger) doLocked(h *Hint, a *Action) *Receipt {
	r := &Receipt{ID: a.ID, Kind: a.Kind, State: Accepted, At: l.c.Now(), Session: h.Session}
	w := &wish{
		action: *a, space: h.Space, session: sessionKey{h.Space, h.Session}, part: h.Part, receipt: r, later: h.Later,
	}
	if w.action.For == 0 && a.Kind != Drop {
		w.action.For = DefaultTime
	}
	w.epoch, w.at = l.c.Memory.Epoch(h.Space), r.At.Add(min(w.action.For, MaxTime))
	lowers := a.Kind == Demote || a.Kind == Drop
	for i := range h.Chains {
		c := h.Chains[i].clone()
		if lowers && !h.Exact {
			c = c.own()
		}
		if c.Hashes.N > 0 {
			w.chains, w.blocks = append(w.chains, c), w.blocks+c.Hashes.N
		}
	}
	switch {
	case w.blocks == 0:
		r.State, r.Reason = Missing, "the session was the first to store none of the blocks"
	case l.mu.blocks+w.blocks > MaxBlocks || l.account(w).blocks+w.blocks > MaxBlocks/sessionPart:
		r.State, r.Reason = Rejected, fmt.Sprintf("actions that go on may concern %d blocks of a session, %d of all",
			MaxBlocks/sessionPart, MaxBlocks)
	default:
		l.startLocked(w)
	}
	l.mu.count.note(r.State)
	if len(l.mu.receipts) == MaxReceipts {
		l.mu.receipts = append(l.mu.receipts[:0], l.mu.receipts[1:]...)
	}
	l.mu.receipts = append(l.mu.receipts, r)
	return r
}

func (c *Counts) note(s State) {
	*[...]*uint64{
		Accepted: &c.Accepted, Clipped: &c.Clipped, Deferred: &c.Deferred, Rejected: &c.Rejected, Missing: &c.Missing,
	}[s]++
}

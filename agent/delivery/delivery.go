// Package delivery is the agent's memory of transfers: which prompts' blocks a prefill engine has
// promised, and which of them this agent fetches from another one. It tells how long it is worth to
// wait for blocks, and nothing about the blocks themselves. It does no I/O: fetches are run by a
// function that it is given.
package delivery

import (
	"container/list"
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Limits of a table.
const (
	MaxTransfers = 4096 // open and complete ones
	MaxFetches   = 256  // running ones; a further one is refused
	// MaxFetchBytes bounds the hashes of all fetches that run, bytes; one without room is refused.
	MaxFetchBytes = 48 << 20
	maxRecords    = 4096 // fetches, those that have ended and are remembered included
)

// DefaultTTL is the TTL of a Config without one.
const DefaultTTL = 30 * time.Second

// Config configures a table.
type Config struct {
	// TTL is how long a transfer lasts that was completed without having been offered, and how long
	// a fetch goes on, or is remembered, after the last look-up that named it.
	TTL time.Duration
	Now func() time.Time // nil: time.Now
	// Fetch brings the blocks of a request from another agent, and returns when nothing more comes
	// or ctx ends. nil: no other agent can be asked.
	Fetch func(ctx context.Context, r *Request) error
	// Deliver tells another agent that a transfer was delivered. It must not block. nil: nobody is
	// told.
	Deliver func(peer string, space pool.Fingerprint, name string)

	// What is known of the own agent. Look-ups need it.
	Address string // where other agents reach it; empty: they cannot
	Index   pool.Index
	Epoch   func(s pool.SpaceID) uint32
	// Shared reports whether a tier is up that other agents share; nil: there are no tiers.
	Shared func() bool
	// Unserved reports whether something that engines of a space had sent was not served.
	Unserved func(s pool.SpaceID) bool
}

// Key is a transfer's name, which belongs to a space.
type Key struct {
	Space pool.SpaceID
	Name  string
}

// Table holds the transfers that engines of this agent have offered, and the fetches from other
// agents that look-ups have started. Its methods may be called from any goroutine; none waits. Its
// mutex is a leaf: nothing is called while it is held.
type Table struct {
	cfg      Config
	watching atomic.Int32   // spaces in mu.watched
	running  sync.WaitGroup // fetches

	mu struct {
		sync.Mutex
		closed    bool
		transfers map[Key]*transfer
		in        [delivered + 1]int // transfers by state; of Unknown it says nothing
		fetches   map[Key]*fetch
		asked     *list.List // of *fetch, the one not asked for longest first
		fetching  int        // fetches that run
		hashes    int64      // bytes of their hashes
		watched   map[pool.SpaceID]chan struct{}
		count     Counts
	}
}

// New makes an empty table.
func New(cfg Config) *Table {
	if cfg.TTL == 0 {
		cfg.TTL = DefaultTTL
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	t := &Table{cfg: cfg}
	t.mu.transfers = make(map[Key]*transfer)
	t.mu.fetches, t.mu.asked = make(map[Key]*fetch), list.New()
	t.mu.watched = make(map[pool.SpaceID]chan struct{})
	return t
}

// Close ends all fetches, and returns when none runs any more. Further ones are refused.
func (t *Table) Close() {
	t.mu.Lock()
	t.mu.closed = true
	for _, f := range t.mu.fetches {
		f.cancel()
	}
	t.mu.Unlock()
	t.running.Wait()
}

// EndSession ends what a session holds: its open transfers are complete, because nothing more
// comes, and the fetches end that no other session has asked for.
func (t *Table) EndSession(session uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, tr := range t.mu.transfers {
		switch {
		case tr.owner != session || tr.state == Complete:
		case tr.state == delivered:
			t.removeLocked(tr)
		default:
			t.mu.count.Abandoned++
			t.completeLocked(tr)
		}
	}
	for _, f := range t.mu.fetches {
		f.leave(session)
	}
}

// Expire ends what has reached its time. It is to be called from time to time: nothing depends on
// when, except that watchers learn of it.
func (t *Table) Expire() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expireLocked(t.cfg.Now())
}

func (t *Table) expireLocked(now time.Time) {
	for _, tr := range t.mu.transfers {
		t.expiredLocked(tr, now)
	}
	for e := t.mu.asked.Front(); e != nil; e = t.mu.asked.Front() {
		f := e.Value.(*fetch)
		if now.Before(f.until) {
			break
		}
		t.forgetLocked(f)
	}
}

// Report is the state of a table, for people and metrics.
type Report struct {
	Open     int `json:"open" metric:"transfers{state=open}"`
	Complete int `json:"complete" metric:"transfers{state=complete}"`
	Fetching int `json:"fetching"` // fetches that run
	Counts
}

// Counts are the counters of a table since its start.
type Counts struct {
	Opened    uint64 `json:"opened" metric:"transfers_total{event=opened}"`
	Completed uint64 `json:"completed" metric:"transfers_total{event=completed}"`
	Delivered uint64 `json:"delivered" metric:"transfers_total{event=delivered}"`
	Expired   uint64 `json:"expired" metric:"transfers_total{event=expired}"`     // not delivered in time
	Abandoned uint64 `json:"abandoned" metric:"transfers_total{event=abandoned}"` // open when their session ended
	Refused   uint64 `json:"refused" metric:"transfers_total{event=refused}"`     // not opened: too many
	Ignored   uint64 `json:"ignored"`                                             // of sessions without an open space

	Fetches          uint64 `json:"fetches" metric:"peer_fetches_total{event=started}"`
	FetchesFailed    uint64 `json:"fetches_failed" metric:"peer_fetches_total{event=failed}"` // not served to the end
	FetchesCancelled uint64 `json:"fetches_cancelled" metric:"peer_fetches_total{event=cancelled}"`
	FetchesRefused   uint64 `json:"fetches_refused" metric:"peer_fetches_total{event=refused}"` // too many, or nobody
}

// Report returns the state and the counters.
func (t *Table) Report() Report {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expireLocked(t.cfg.Now())
	return Report{
		Open:     t.mu.in[Open],
		Complete: t.mu.in[Complete],
		Fetching: t.mu.fetching,
		Counts:   t.mu.count,
	}
}

package events

import (
	"maps"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
)

// Desk tells the sessions of all spaces. A nil Desk refuses all of them. All methods may run
// concurrently.
type Desk struct {
	memory  Memory
	stop    chan struct{}
	stopped sync.WaitGroup
	refused atomic.Uint64
	keeper  *keeper // nil: tokens end with the process

	mu     sync.Mutex
	spaces map[pool.SpaceID]*space
	tails  [MaxTails]*Tail
	gaps   uint64 // of spaces that were closed
}

// Memory is the pool whose blocks are told.
type Memory interface {
	pool.Journal
	Epoch(s pool.SpaceID) uint32
}

// New returns the desk of a pool, which works until Close. It keeps tokens in a file, unless path
// is empty; the file is opened when there is something to keep or to load.
func New(memory Memory, path string, log *zap.Logger) *Desk {
	d := &Desk{memory: memory, stop: make(chan struct{}), spaces: map[pool.SpaceID]*space{}}
	d.stopped.Go(d.work)
	if d.keeper = newKeeper(d, path, log); d.keeper != nil {
		d.stopped.Go(d.keeper.work)
	}
	return d
}

// Close ends the desk's goroutines and waits for them.
func (d *Desk) Close() {
	if d != nil {
		close(d.stop)
		d.stopped.Wait()
	}
}

// maxWaiting is how many messages of a session may wait to be written when it asks for events. With
// more it is told to ask again: a peer that does not read must not gather answers in memory.
const maxWaiting = 8

// Serve serves BLOCK_TOKENS and NEXT_EVENTS of a session, with the rules of its space, or nil if it
// has none that is open; waiting is the number of messages that wait to be written to it. send must
// not wait. It is called at most once for each NEXT_EVENTS, at once or when there is something to
// tell, and not after Leave.
func (d *Desk) Serve(session uint64, rules *lookup.Space, msg any, waiting int, send func(any)) {
	switch m := msg.(type) {
	case *ipc.BlockTokens:
		if d == nil || rules == nil {
			return
		}
		if sp := d.get(rules.ID); sp != nil {
			refused, fresh := sp.learn(m)
			if d.refused.Add(uint64(refused)); fresh > 0 {
				d.keeper.keep(sp.print, m)
			}
		}
	case *ipc.NextEvents:
		blocks := int(m.Blocks)
		if waiting > maxWaiting {
			blocks = 0
		}
		switch {
		case d == nil || rules == nil || !d.open(rules).next(session, m.Req, blocks, m.Anew, send):
			send(&ipc.BlockEvents{Req: m.Req, State: ipc.EventsRefused})
		case blocks == 0:
			send(&ipc.BlockEvents{Req: m.Req, State: ipc.EventsMore})
		}
	}
}

// Leave ends what a session is told.
func (d *Desk) Leave(session uint64) {
	if d == nil {
		return
	}
	for _, sp := range d.all() {
		sp.leave(session)
	}
}

func (d *Desk) get(id pool.SpaceID) *space {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.spaces[id]
}

// open returns a space, from now on watched. It is called by a session of the space, which keeps it
// open.
func (d *Desk) open(rules *lookup.Space) *space {
	d.mu.Lock()
	defer d.mu.Unlock()
	sp := d.spaces[rules.ID]
	if sp == nil {
		sp = newSpace(rules, d.memory, defaultLimits())
		d.spaces[rules.ID] = sp
		for _, medium := range sp.media {
			if medium != nil {
				medium.Watch(rules.ID)
			}
		}
		d.keeper.load()
		for _, t := range d.tails {
			if t != nil {
				t.signal() // which it is to be told of too
			}
		}
	}
	return sp
}

// mediaOf returns the journals of memory and, if there is one, of the storage below it.
func mediaOf(memory Memory) (all [media]pool.Journal) {
	all[0] = memory
	if s, ok := memory.(pool.Storage); ok {
		all[1] = s.Storage()
	}
	return all
}

// work looks up what memory and storage note.
func (d *Desk) work() {
	all := mediaOf(d.memory)
	var lists [media][]pool.Change
	var below <-chan struct{}
	if all[1] != nil {
		below = all[1].Changed()
	}
	for {
		m := 0
		select {
		case <-d.stop:
			return
		case <-d.memory.Changed():
		case <-below:
			m = 1
		}
		list, lost := all[m].Changes(lists[m][:0])
		lists[m] = list
		if lost {
			d.compareAll()
			continue
		}
		for rest := list; len(rest) > 0; {
			n := 1
			for n < len(rest) && rest[n].Space == rest[0].Space {
				n++
			}
			if sp := d.get(rest[0].Space); sp != nil {
				sp.changed(rest[:n])
				d.keepUnkept(sp)
			}
			rest = rest[n:]
		}
	}
}

// compareAll compares all spaces with memory, and drops those that were closed.
func (d *Desk) compareAll() {
	for id, sp := range d.all() {
		open, cleared := sp.compare()
		if !open {
			d.drop(id, sp)
			d.keeper.load() // which lets go of it
			continue
		}
		if d.keepUnkept(sp); cleared {
			d.keeper.renew()
		}
	}
}

// drop removes a space that was closed, but keeps what it has counted.
func (d *Desk) drop(id pool.SpaceID, sp *space) {
	var r Report
	sp.report(&r)
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.spaces, id)
	d.gaps += r.Gaps
}

// keepUnkept keeps the tokens of blocks that were not held when the file was made, and are now.
func (d *Desk) keepUnkept(sp *space) {
	said, more := sp.takeUnkept()
	for _, m := range said {
		d.keeper.keep(sp.print, m)
	}
	if more {
		d.keeper.renew()
	}
}

// Forget drops what the file of tokens has of a space that was reset, also if nobody asks for its
// events.
func (d *Desk) Forget(fp pool.Fingerprint) {
	if d != nil && d.keeper != nil {
		d.keeper.forget(fp)
	}
}

func (d *Desk) all() map[pool.SpaceID]*space {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.spaces)
}

// Report is the state of a Desk.
type Report struct {
	Spaces      int `json:"spaces"`   // with events
	Subscribers int `json:"sessions"` // that are told
	Blocks      int `json:"blocks"`   // whose tokens, or whose followers' tokens, are kept
	// Of them, those that subscribers are told are stored: in memory, and in the storage below it.
	Told    [media]int `json:"blocks_told"`
	Bytes   int64      `json:"bytes" metric:"events_bytes"`
	Refused uint64     `json:"blocks_refused" metric:"events_blocks_refused_total"` // tokens were not taken
	Gaps    uint64     `json:"gaps" metric:"events_gaps_total"`                     // a subscriber was too far behind

	FileBytes  int64  `json:"file_bytes"` // of the file of tokens
	FileErrors uint64 `json:"file_errors" metric:"events_file_errors_total"`
}

// Report returns the desk's state.
func (d *Desk) Report() (r Report) {
	if d == nil {
		return r
	}
	r.Refused = d.refused.Load()
	if k := d.keeper; k != nil {
		r.FileBytes, r.FileErrors = k.bytes.Load(), k.errors.Load()
	}
	d.mu.Lock()
	r.Gaps = d.gaps // together with the spaces: one that is dropped meanwhile counts once
	spaces := maps.Clone(d.spaces)
	d.mu.Unlock()
	for _, sp := range spaces {
		r.Spaces++
		sp.report(&r)
	}
	return r
}

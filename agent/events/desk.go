// Package events tells routers, through the engines, which blocks memory and the node's disk hold:
// one stored event when a block comes to either and one removed event when it goes, with the tokens
// that routers need.
//
// The pool only notes the names of entries that came or went. The desk looks up what has become of
// them, so a note that is late, repeated or lost costs a look-up and never a wrong event. A ledger
// keeps the tokens, which subscriber was told of which blocks, and a bounded log of what has
// changed. A subscriber is a cursor in the log and, at first, in the blocks: it is told where what
// it knows differs from what is so, so a slow one needs no queue of events.
package events

import (
	"maps"
	"slices"
	"sync"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
)

// Desk tells the sessions of all spaces. All methods may run concurrently.
type Desk struct {
	memory  Memory
	media   [media]pool.Journal // memory, and the storage below it or nil
	stop    chan struct{}
	stopped sync.WaitGroup
	keeper  *keeper // nil: tokens end with the process

	// The lock is taken before the pool's, and by nothing that saves, loads or looks up.
	mu      sync.Mutex
	spaces  map[pool.SpaceID]*space
	refused uint64
	gaps    uint64
}

// Memory is the pool whose blocks are told.
type Memory interface {
	pool.Journal
	Epoch(s pool.SpaceID) uint32
}

// New returns the desk of a pool and of the storage below it, or nil, which works until Close. It
// keeps tokens in the folder path, which is made when there is something to keep; empty: it does
// not.
func New(memory Memory, storage pool.Journal, path string, log *zap.Logger) *Desk {
	d := &Desk{
		memory: memory, media: [media]pool.Journal{memory, storage}, stop: make(chan struct{}),
		spaces: map[pool.SpaceID]*space{},
	}
	if path != "" {
		d.keeper = &keeper{
			desk: d, path: path, log: log, wake: make(chan struct{}, 1), files: map[*space]*tokenFile{},
			forgotten: map[string]bool{},
		}
		d.stopped.Go(d.keeper.work)
	}
	d.stopped.Go(d.work)
	return d
}

// Close ends the desk's goroutines and waits for them.
func (d *Desk) Close() {
	close(d.stop)
	d.stopped.Wait()
}

// maxWaiting is how many messages of a session may wait to be written when it asks for events. With
// more it is told to ask again: a peer that does not read must not gather answers in memory.
const maxWaiting = 8

// Serve serves BLOCK_TOKENS and NEXT_EVENTS of a session, with the rules of its space, or nil if it
// has none that is open; waiting is the number of messages that wait to be written to it. send must
// not wait. It is called at most once for each NEXT_EVENTS, at once or when there is something to
// tell, and not after Leave. It returns false for another message.
func (d *Desk) Serve(session uint64, rules *lookup.Space, msg any, waiting int, send func(any)) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch m := msg.(type) {
	case *ipc.BlockTokens:
		if rules != nil && d.spaces[rules.ID] != nil {
			d.refused += uint64(d.spaces[rules.ID].learn(m, false))
		}
	case *ipc.NextEvents:
		blocks := int(m.Blocks)
		if waiting > maxWaiting {
			blocks = 0
		}
		switch {
		case rules == nil || !d.open(rules).next(session, m.Req, blocks, m.Anew, send):
			send(&ipc.BlockEvents{Req: m.Req, State: ipc.EventsRefused})
		case blocks == 0:
			send(&ipc.BlockEvents{Req: m.Req, State: ipc.EventsMore})
		}
	default:
		return false
	}
	return true
}

// Leave ends what a session is told.
func (d *Desk) Leave(session uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, sp := range d.spaces {
		if sub := sp.subs[session]; sub != nil {
			sp.begin(sub) // its bit is another one's next
			delete(sp.subs, session)
		}
	}
}

// open returns a space, from now on watched. It is called by a session of the space, which keeps it
// open.
func (d *Desk) open(rules *lookup.Space) *space {
	sp := d.spaces[rules.ID]
	if sp == nil {
		for _, old := range d.spaces {
			d.check(old) // one of the same name, or any other one, was closed and is not noticed yet
		}
		sp = newSpace(d, rules, defaultLimits())
		d.spaces[rules.ID] = sp
		for _, medium := range d.media {
			if medium != nil {
				medium.Watch(rules.ID)
			}
		}
		d.keeper.signal() // which loads its tokens
		sp.serve()
	}
	return sp
}

// check notices that a space was reset, or closed: it is dropped then, and never opens again.
func (d *Desk) check(sp *space) (open bool) {
	if d.memory.Holds(sp.id, 0, pool.Hashes{Len: 1}, nil) {
		sp.follow()
		return true
	}
	delete(d.spaces, sp.id)
	d.keeper.signal() // which lets go of it
	return false
}

// work looks up what memory and storage note.
func (d *Desk) work() {
	var lists [media][]pool.Change
	var below <-chan struct{}
	if d.media[1] != nil {
		below = d.media[1].Changed()
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
		var lost bool
		if lists[m], lost = d.media[m].Changes(lists[m][:0]); lost {
			d.compareAll()
		} else {
			d.changed(lists[m])
		}
	}
}

// changed looks up blocks that a medium noted.
func (d *Desk) changed(list []pool.Change) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range list {
		if sp := d.spaces[list[i].Space]; sp != nil {
			sp.ask(list[i].Group, &list[i].Hash)
		}
	}
	for _, sp := range d.spaces {
		for _, l := range sp.ledgers {
			if len(l.asked) > 0 {
				sp.lookUp(l)
			}
		}
	}
}

// compareAll looks up all blocks of all spaces, a part at a time, so that others wait for the lock
// only as long: any block may have come or gone.
func (d *Desk) compareAll() {
	d.mu.Lock()
	spaces := slices.Collect(maps.Values(d.spaces))
	for _, sp := range spaces {
		d.check(sp) // a reset is told before others are compared
	}
	d.mu.Unlock()
	for _, sp := range spaces {
		for i := range sp.ledgers {
			for from, more := uint32(1), true; more; from += compareStride {
				d.mu.Lock()
				more = d.check(sp) && sp.comparePart(sp.ledgers[i], from)
				d.mu.Unlock()
			}
		}
	}
}

// Forget drops the tokens that an earlier process kept of a space that was reset, also if nobody
// asks for its events.
func (d *Desk) Forget(fp pool.Fingerprint) {
	if d.keeper != nil {
		d.mu.Lock()
		d.keeper.forgotten[nameOf(fp)] = true
		d.mu.Unlock()
		d.keeper.signal()
	}
}

// Report is the state of a Desk.
type Report struct {
	Spaces      int `json:"spaces"`   // with events
	Subscribers int `json:"sessions"` // that are told
	Blocks      int `json:"blocks"`   // whose tokens, or whose followers' tokens, are kept

	Bytes      int64  `json:"bytes" metric:"events_bytes"`
	Refused    uint64 `json:"blocks_refused" metric:"events_blocks_refused_total"` // tokens were not taken
	Gaps       uint64 `json:"gaps" metric:"events_gaps_total"`                     // a subscriber was too far behind
	FileErrors uint64 `json:"file_errors" metric:"events_file_errors_total"`
}

// Report returns the desk's state.
func (d *Desk) Report() (r Report) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r.Spaces, r.Refused, r.Gaps = len(d.spaces), d.refused, d.gaps
	if d.keeper != nil {
		r.FileErrors = d.keeper.errors.Load()
	}
	for _, sp := range d.spaces {
		r.Subscribers += len(sp.subs)
		r.Bytes += int64(sp.unkeptBytes)
		for _, l := range sp.ledgers {
			r.Blocks += len(l.index)
			r.Bytes += l.bytes()
		}
	}
	return r
}

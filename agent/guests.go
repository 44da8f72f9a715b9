package agent

import (
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// Guests are what plugs into the agent beside its core, such as transfers between engines, other
// agents, hints, KV events, explanations, and HTTP. The agent calls them from any goroutine. The
// look-up's functions and Saved must not wait.
type Guests interface {
	// Start begins before a socket opens, and takes the socket directory. Close ends all when
	// nothing is served any more; a successor may take the directory then.
	Start() error
	Close()

	// Serve serves a message of a session that the core has no part in; false: nor has a guest.
	// rules are those of the session's open space, or nil; waiting is how many messages wait to be
	// written to it. send queues one more; it is not called after Left.
	Serve(session uint64, rules *lookup.Space, msg any, waiting int, send func(any)) bool
	// Left says that a session has no registration any more: nothing more comes from it.
	Left(session uint64)
	// Reset says that a space has a new weights epoch: at the time, by whom.
	Reset(fp pool.Fingerprint, at time.Time, by string)
	// Saved says what became of the blocks of a save. rules are those of its space; nil: it is not
	// open.
	Saved(fp pool.Fingerprint, rules *lookup.Space, sections []transfer.Section, status []pool.Status)
	// Expire ends what has reached its time. It is called every Limits.Watch.
	Expire()

	// Expect returns what may still come for a look-up that names a transfer. It is called before
	// the index is read, so that blocks stored in between are in the answer, or announced.
	Expect(req *ipc.LookupRequest, rules *lookup.Space, q *lookup.Query, spec *pool.Spec) lookup.Expected
	// Answered says that a look-up has its answer; hashTokens is 0 for an unknown space.
	Answered(fp pool.Fingerprint, hashTokens uint32, req *ipc.LookupRequest, reply *ipc.LookupReply)
	// Awaited reports whether an engine may wait for saves of a space.
	Awaited(s pool.SpaceID) bool
}

// Plug gives the agent its guests, before Start.
func (a *Agent) Plug(g Guests) { a.guests = g }

// saved tells the guests what became of a save's blocks.
func (s *session) saved(sections []transfer.Section, status []pool.Status) {
	if st := s.seat.Load(); st != nil {
		s.owner.guests.Saved(st.space.fp, st.space.open.Load(), sections, status)
	}
}

// Unserved reports whether something that the schedulers of a space had sent before the call was
// not served: what another one told an engine, or another agent, may overtake an OFFER on its way
// here.
func (a *Agent) Unserved(s pool.SpaceID) bool {
	for _, st := range a.registry.view.Load().seats {
		rules := st.space.open.Load()
		if st.role == ipc.RoleScheduler && rules != nil && rules.ID == s && st.session.conn.Unserved() {
			return true
		}
	}
	return false
}

// OpenSpace returns the pool's number and the epoch of a space that other agents may read: one that
// is not private, once the sizes of all its shards are known.
func (a *Agent) OpenSpace(fp pool.Fingerprint) (id pool.SpaceID, epoch uint32, ok bool) {
	sp := a.registry.view.Load().spaces[fp]
	if sp == nil {
		return 0, 0, false
	}
	rules := sp.open.Load()
	if rules == nil || sp.spec.Private {
		return 0, 0, false
	}
	return rules.ID, a.pool.Epoch(rules.ID), true
}

// Open returns the description and the rules of the open space with the pool's number; nil: there
// is none.
func (a *Agent) Open(s pool.SpaceID) (*pool.Spec, *lookup.Space) {
	for _, sp := range a.registry.view.Load().spaces {
		if rules := sp.open.Load(); rules != nil && rules.ID == s {
			return &sp.spec, rules
		}
	}
	return nil, nil
}

package agent

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/agent/lease"
	"github.com/kvagent/kvagent/agent/registration"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/transfer"
	"github.com/kvagent/kvagent/transfer/pace"
)

// engine is one vLLM instance: a scheduler's session and one session per rank, each with a seat.
// Once the engine is in the registry, registry.mu guards all fields but complete.
type engine struct {
	instance  string
	space     *space
	world     uint32
	scheduler *seat
	ranks     []*seat // by rank; nil: empty
	acct      *lease.Account
	complete  atomic.Bool // all ranks registered, and their workers run
}

// seat is one registration: a session's place in an engine, and the resources that it registered.
type seat struct {
	session *session
	engine  *engine
	space   *space
	role    uint8
	rank    uint32
	shards  []uint32 // that a worker holds
	holder  *lease.Holder

	// A worker's; its session sets them before the seat is registered.
	layouts []transfer.Held // of shards
	sizes   [][]uint32      // by index of the shard, then group: bytes of one block
	peer    cudaipc.Peer
	gpu     cudaipc.UUID // of its regions; zero: on the CPU
	regions int
	bytes   int64 // of the regions

	lookups *lookupSock // the look-up socket that it named; nil: none

	stages *registration.Stages // a worker's; the session's reader sets them; nil: none were declared

	// The pool's owner of the blocks that the worker stores; 0: none. registry.mu is held when it
	// changes.
	owner    atomic.Uint32
	budget   int64 // bytes of the owner's blocks that the worker may hold; under registry.mu
	budgeted bool  // BUDGET came; the session's reader's

	// Under registry.mu.
	claimed    bool
	registered bool
	leaving    bool

	worker atomic.Pointer[transfer.Worker] // nil until the space is open; set once
	steps  atomic.Pointer[pace.Engine]     // set before worker; the session's reader uses it
	held   heldLoads                       // loads held for this registration, which end with it
}

// fits returns an error if a registration does not belong to this engine.
func (e *engine) fits(r *ipc.Register, sp *space) error {
	switch {
	case e.space != sp:
		return fmt.Errorf("identity: not that of the other sessions of instance %q (spaces %x and %x)", e.instance,
			sp.fp, e.space.fp)
	case e.world != r.World:
		return fmt.Errorf("world: %d, allowed: %d, as the other sessions of instance %q have it", r.World, e.world,
			e.instance)
	}
	if holder := *e.place(r.Role, r.Rank); holder != nil {
		return fmt.Errorf("rank: %s of instance %q is already registered by process %d", placeName(r.Role, r.Rank),
			e.instance, holder.session.pid)
	}
	return e.covers(r)
}

// covers returns an error if r is the last rank and leaves shards that no rank holds. The ranks
// before may leave any number: how many shards a later one holds is not known.
func (e *engine) covers(r *ipc.Register) error {
	have, left := slices.Clone(r.Held), int(e.world)-1
	for _, s := range e.ranks {
		if s != nil {
			have, left = append(have, s.shards...), left-1
		}
	}
	slices.Sort(have)
	if missing := int(r.Shards) - len(slices.Compact(have)); r.Role == ipc.RoleWorker && left == 0 && missing > 0 {
		return fmt.Errorf("held: shards %v of rank %d, the last one, leave %d of %d shards without a rank, allowed: "+
			"every shard has a rank", r.Held, r.Rank, missing, r.Shards)
	}
	return nil
}

// place returns the address of the seat of a role and rank.
func (e *engine) place(role uint8, rank uint32) **seat {
	if role == ipc.RoleScheduler {
		return &e.scheduler
	}
	return &e.ranks[rank]
}

func placeName(role uint8, rank uint32) string {
	if role == ipc.RoleScheduler {
		return "the scheduler"
	}
	return fmt.Sprintf("rank %d", rank)
}

// step returns what a worker is doing and for how long: the older of its two threads' steps, or ""
// if it is idle.
func (st *seat) step() (string, time.Duration) {
	w := st.worker.Load()
	if w == nil {
		return "", 0
	}
	state := w.State()
	kind, th := "save", state.Save
	busy := func(th *transfer.ThreadState) bool { // an empty phase: no job yet
		return th.Phase != transfer.Idle && th.Phase != ""
	}
	if load := state.Load; busy(&load) && (!busy(&th) || load.Age >= th.Age) {
		kind, th = "load", load
	}
	if !busy(&th) {
		return "", 0
	}
	return fmt.Sprintf("%s job %d %s", kind, th.Job, th.Phase), th.Age
}

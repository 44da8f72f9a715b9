package agent

import (
	"cmp"
	"math"
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
)

// The hot path: a look-up is answered in microseconds, without holding a lock across the index and
// without allocating.

// handle answers one request of a look-up socket, in any form. The socket's goroutine calls it.
// start is the arrival time, so the tier waits of earlier look-ups count as part of this one's
// wait.
func (k *lookupSock) handle(req *ipc.LookupRequest, start time.Time) ipc.LookupReply {
	reply := ipc.LookupReply{Boot: k.boot}
	if req.Form == ipc.FormReset {
		k.reset(&reply)
		k.metrics.CountLookup(reply.Status, 0, 0)
		return reply
	}
	rules, st := k.resolve(req)
	switch {
	case k.switches.draining() || !k.switches.loads.Load():
		reply.Status = ipc.LookupOff
	case rules == nil:
		reply.Status = ipc.LookupNotRegistered
	case !groupsFit(req.Groups, rules):
		reply.Status = ipc.LookupMalformed
	default:
		k.find(req, rules, st, start, &reply)
	}
	k.metrics.CountLookup(reply.Status, min(req.Tokens, math.MaxUint32), uint64(reply.Tokens))
	return reply
}

// resolve finds the rules of the space a request is about, or nil if the client may not be promised
// anything of it, and the seat of the session it names, if that is a seat of the space.
func (k *lookupSock) resolve(req *ipc.LookupRequest) (*lookup.Space, *seat) {
	v := k.registry.view.Load()
	_, sp := k.spaceIn(v, req)
	if sp == nil {
		return nil, nil
	}
	var st *seat
	if req.Session != 0 {
		if st = v.seats[req.Session]; st != nil && st.space != sp {
			st = nil
		}
	}
	// All ranks of the asking engine must be registered, or of any of the space if none is named.
	if st != nil && !st.engine.complete.Load() || st == nil && sp.complete.Load() == 0 {
		return nil, st
	}
	return sp.open.Load(), st
}

// spaceIn returns the space that a request is about, which is nil if it is not open.
func (k *lookupSock) spaceIn(v *view, req *ipc.LookupRequest) (pool.Fingerprint, *space) {
	fp := cmp.Or(pool.Fingerprint(req.Space), k.fp)
	return fp, v.spaces[fp]
}

func groupsFit(groups []uint8, rules *lookup.Space) bool {
	for _, g := range groups {
		if int(g) >= len(rules.Groups) {
			return false
		}
	}
	return true
}

// find queries the index, and pins the blocks found if the request reserves.
func (k *lookupSock) find(req *ipc.LookupRequest, rules *lookup.Space, st *seat, start time.Time,
	reply *ipc.LookupReply) {
	q := &k.query
	*q = lookup.Query{
		Tokens: uint32(min(req.Tokens, math.MaxUint32)), HBMTokens: req.HBMTokens, Groups: req.Groups,
		AllowFull: req.Form != ipc.FormOwn,
	}
	if req.HashLen > 0 {
		q.Hashes = pool.Chain(req.Hashes, req.HashLen)
	}
	pending := false
	var more lookup.Expected
	if len(req.Transfer) > 0 {
		if _, sp := k.spaceIn(k.registry.view.Load(), req); sp != nil { // else it was closed meanwhile
			more = k.guests.Expect(req, rules, q, &sp.spec)
		}
	}
	if k.tiers != nil {
		pending = k.askTiers(req, rules, start, more.Anew)
		reply.Late = pending
	}
	loadable := false
	if req.Form == ipc.FormOwn && req.Want >= ipc.WantReserve {
		k.reserve(q, rules, st, reply)
		loadable = req.Want == ipc.WantReady && k.checkReady(q, rules, st, reply)
	} else {
		reply.Tokens = lookup.Longest(k.index, rules, q)
	}
	if k.tiers != nil && reply.Lease == 0 && reply.Tokens > 0 {
		k.hint(q, rules)
	}
	if req.Form != ipc.FormOwn {
		reply.Blocks = uint64(reply.Tokens / rules.Groups[0].BlockTokens) // of the simple form, which asks for group 0
		return
	}
	late := k.metrics.CountTime(time.Since(start), req.Deadline())
	if late { // the client has stopped waiting
		if reply.Lease != 0 {
			k.ledger.Release(st.engine.acct, []uint64{reply.Lease})
		}
		*reply = ipc.LookupReply{Status: ipc.LookupOverloaded, Boot: reply.Boot, Late: reply.Late}
	}
	grows := pending && couldGrow(q, rules, reply.Tokens) || beyond(more, reply)
	whole := reply.Status == ipc.LookupHit || reply.Status == ipc.LookupLeaseCap && more.Grows
	if (pending || more.Grows) && late || whole && grows {
		// Pending still carries the lease for the blocks found so far; a client out of time can use
		// it. One that releases it and retries finds the rest already being fetched.
		if reply.Status = ipc.LookupPending; reply.Lease != 0 && k.tiers != nil {
			k.hint(q, rules)
		}
	}
	if loadable && reply.Status == ipc.LookupHit {
		reply.Status = ipc.LookupReady
	}
}

// reserve pins the blocks it finds under a lease of the named session.
func (k *lookupSock) reserve(q *lookup.Query, rules *lookup.Space, st *seat, reply *ipc.LookupReply) {
	room, ok := int64(0), false
	if st != nil {
		room, ok = k.ledger.Room(st.holder)
	}
	if !ok {
		reply.Status, reply.Tokens = ipc.LookupNoSession, lookup.Longest(k.index, rules, q)
		return
	}
	e := k.ledger.Take()
	hit := lookup.Reserve(k.index, rules, q, room, e.Refs[:0])
	e.Refs = hit.Refs
	if hit.Tokens > 0 {
		disk, shared := hit.Fetched(k.tiers, q)
		if number := k.ledger.Add(st.holder, e, hit.Bytes); number != 0 {
			reply.Tokens, reply.Lease, reply.Disk, reply.Shared = hit.Tokens, number, disk, shared
			k.metrics.LeasesGiven.Add(1)
			return
		}
	}
	k.ledger.GiveBack(e)
	if hit.Capped || hit.Tokens > 0 {
		reply.Status, reply.Tokens = ipc.LookupLeaseCap, lookup.Longest(k.index, rules, q)
		if k.tiers != nil && room >= 2*st.space.unitBytes() {
			reply.Status = ipc.LookupPending // the prefetch budget is full; it has room again soon
		}
	}
}

// checkReady reports whether the blocks of a new lease can be loaded at once. If some are not what
// was saved, they were dropped, and the lease is replaced by one of the blocks before them.
func (k *lookupSock) checkReady(q *lookup.Query, rules *lookup.Space, st *seat, reply *ipc.LookupReply) bool {
	if reply.Lease == 0 {
		return false
	}
	switch k.readiness.check(rules, &st.space.spec, q.Hashes, q.HBMTokens, reply.Tokens) {
	case isReady:
		return true
	case wasDropped:
		k.ledger.Release(st.engine.acct, []uint64{reply.Lease})
		*reply = ipc.LookupReply{Boot: reply.Boot, Late: reply.Late}
		k.reserve(q, rules, st, reply)
	}
	return false
}

// reset serves upstream's reset: it starts a new weights epoch of the socket's space.
func (k *lookupSock) reset(reply *ipc.LookupReply) {
	reply.Status = ipc.LookupNotRegistered
	sp := k.registry.view.Load().spaces[k.fp]
	if sp == nil || k.fp == (pool.Fingerprint{}) {
		return
	}
	if _, err := k.resetSpace(sp, nil, "a look-up socket"); err == nil {
		reply.Status = ipc.LookupHit
	}
}

// answered tells the guests of a look-up that has its answer.
func (k *lookupSock) answered(req *ipc.LookupRequest, reply *ipc.LookupReply) {
	fp, sp := k.spaceIn(k.registry.view.Load(), req)
	hashTokens := uint32(0)
	if sp != nil {
		hashTokens = sp.hashTokens
	}
	k.guests.Answered(fp, hashTokens, req, reply)
}

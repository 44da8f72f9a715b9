package agent

import (
	"time"

	"github.com/kvagent/kvagent/agent/delivery"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
)

// askTiers asks the lower tiers what they have of a prompt. It waits at most Limits.AskWait, and
// three quarters of the look-up's deadline, because a scheduler waits for it. It reports whether
// some tier has not answered. With anew, earlier answers of shared tiers that they lack a block do
// not count.
func (k *lookupSock) askTiers(req *ipc.LookupRequest, rules *lookup.Space, start time.Time, anew bool) (pending bool) {
	q := &k.query
	if q.Hashes.N == 0 {
		return false
	}
	within := k.cfg.Limits.AskWait
	if req.Form == ipc.FormOwn {
		within = min(within, req.Deadline()*3/4)
	}
	k.asked = k.asked[:0]
	for i := range rules.Groups {
		if q.Asks(uint8(i)) {
			h := rules.Blocks(q.Hashes, uint8(i), uint64(q.HBMTokens), // skip the engine's own blocks
				min(uint64(q.Tokens), uint64(q.Hashes.N)*uint64(rules.HashTokens)))
			k.asked = append(k.asked, pool.Asked{Group: uint8(i), Hashes: h, Sparse: rules.Groups[i].Window != 0})
		}
	}
	if anew {
		return k.tiers.AskAnew(rules.ID, k.asked, start.Add(within))
	}
	return k.tiers.Ask(rules.ID, k.asked, start.Add(within))
}

// hint starts fetching what a probe found in lower tiers, because its client is likely to reserve
// soon.
func (k *lookupSock) hint(q *lookup.Query, rules *lookup.Space) {
	hit := lookup.Reserve(k.index, rules, q, k.cfg.LeaseBytes, k.hinted[:0])
	k.tiers.Hint(hit.Refs)
	k.hinted = hit.Refs[:0]
}

// couldGrow reports whether an answer covers less than the whole prompt, so that a tier that has
// not answered yet may extend it.
func couldGrow(q *lookup.Query, rules *lookup.Space, tokens uint32) bool {
	most := min(uint64(q.Tokens), uint64(q.Hashes.N)*uint64(rules.HashTokens))
	align := uint64(rules.Groups[0].BlockTokens)
	if !q.AllowFull && most > 0 && most == uint64(q.Tokens) {
		most--
	}
	return uint64(tokens) < most-most%align
}

// unitBytes returns the bytes of one block of every group with all shards, about as the pool rounds
// them. The space is open.
func (s *space) unitBytes() (n int64) {
	for g := range s.spec.Groups {
		for _, bytes := range s.spec.Groups[g].ShardBytes {
			n += (int64(bytes) + 1023) &^ 1023
		}
	}
	return n
}

// maxFetchBlocks bounds the blocks of one fetch, of all groups together.
const maxFetchBlocks = ipc.MaxHashes

// expected is what a look-up that names a transfer may still expect of it.
type expected struct {
	grows bool   // more blocks may come
	most  uint32 // tokens that they can reach
	anew  bool   // the shared tiers are to be asked again for what they lacked
}

// expect returns what may still come for the transfer that a look-up names. It is called before the
// index is read, so that blocks stored in between are in the answer or announced by grows. k.query
// is set.
func (k *lookupSock) expect(req *ipc.LookupRequest, rules *lookup.Space) (x expected) {
	x.most = lookup.Limit(rules, &k.query)
	if req.Peer != "" && req.Peer != k.cfg.Peers.Address && k.cfg.Peers.Fetch != nil {
		x.grows = k.fetching(req, rules, x.most)
		return x
	}
	if x.most <= k.query.HBMTokens {
		return expected{} // the engine has all of it
	}
	tr := k.deliveries.State(rules.ID, req.Transfer)
	unheard := false
	if tr.State == delivery.Unknown && !req.Early {
		// The prefill engine has answered, so its OFFER was sent before this look-up, over another
		// socket: it was served by now, or waits there.
		unheard = k.registry.unserved(rules.ID) != nil
		tr = k.deliveries.State(rules.ID, req.Transfer)
	}
	switch tr.State {
	case delivery.Open:
		x.grows = true
		if tr.Tokens > 0 {
			x.most = min(x.most, tr.Tokens)
		}
	case delivery.Unknown:
		x.anew = k.tiers != nil && k.tiers.Shared()
		x.grows = unheard || x.anew || req.Early
	}
	return x
}

// beyond reports whether more may come than an answer has. An answer that a cap cut to nothing, or
// that seems so because blocks were stored while they were pinned, is not what there is.
func (x *expected) beyond(reply *ipc.LookupReply) bool {
	return x.grows && (reply.Tokens < x.most || reply.Status == ipc.LookupLeaseCap)
}

// fetching reports whether the blocks of the transfer that a look-up names are being fetched from
// another agent. The first look-up starts that; if this agent and the engine lack none, the other
// agent is only remembered, to be told of the delivery.
func (k *lookupSock) fetching(req *ipc.LookupRequest, rules *lookup.Space, most uint32) bool {
	if running, known := k.deliveries.Fetching(rules.ID, req.Transfer, req.Peer, req.Session); known {
		return running
	}
	sp := k.spaceIn(k.registry.view.Load(), req)
	if sp == nil {
		return false // closed meanwhile
	}
	return k.deliveries.Start(&delivery.Request{
		Peer: req.Peer, Name: string(req.Transfer), Early: req.Early,
		Fingerprint: sp.fp, Space: rules.ID, Epoch: k.pool.Epoch(rules.ID), Shards: sp.spec.Shards,
		Chains: k.lacking(rules, most),
	}, req.Session)
}

// lacking returns the blocks up to most tokens that this agent has not, in memory of their own.
func (k *lookupSock) lacking(rules *lookup.Space, most uint32) (chains []delivery.Chain) {
	left := maxFetchBlocks
	for i := range rules.Groups {
		if !k.query.Asks(uint8(i)) {
			continue
		}
		g := &rules.Groups[i]
		h := rules.Blocks(k.query.Hashes, uint8(i), 0, uint64(most))
		own := min(int(k.query.HBMTokens/g.BlockTokens), h.N)
		chains = delivery.Lacking(chains, k.index, rules.ID, uint8(i), h, own, g.Window != 0, &left)
	}
	return chains
}

// tellWaiting records whether a look-up that names a transfer waits for more of it.
func (k *lookupSock) tellWaiting(req *ipc.LookupRequest, rules *lookup.Space, reply *ipc.LookupReply) {
	k.deliveries.Waiting(rules.ID, req.Transfer, req.Session, reply.Status == ipc.LookupPending)
}

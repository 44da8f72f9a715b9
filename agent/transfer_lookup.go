package agent

import (
	"github.com/kvagent/kvagent/agent/delivery"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
)

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
	if req.Peer != "" && req.Peer != k.peer && k.fetches {
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
		Fingerprint: sp.fp, Space: rules.ID, Epoch: k.epochOf(rules.ID), Shards: sp.spec.Shards,
		Chains: k.lacking(req, rules, most),
	}, req.Session)
}

// lacking returns the blocks up to most tokens that this agent has not, in memory of their own.
func (k *lookupSock) lacking(req *ipc.LookupRequest, rules *lookup.Space, most uint32) (chains []delivery.Chain) {
	left := maxFetchBlocks
	for i := range rules.Groups {
		if !asksFor(req.Groups, uint8(i)) {
			continue
		}
		g := &rules.Groups[i]
		scale := int(g.BlockTokens / rules.HashTokens)
		h := k.query.Hashes
		h.First, h.Step, h.N = scale-1, scale, int(most/g.BlockTokens)
		own := min(int(k.query.HBMTokens/g.BlockTokens), h.N)
		chains = delivery.Lacking(chains, k.index, rules.ID, uint8(i), h, own, g.Window != 0, &left)
	}
	return chains
}

// tellWaiting records whether a look-up that names a transfer waits for more of it.
func (k *lookupSock) tellWaiting(req *ipc.LookupRequest, rules *lookup.Space, reply *ipc.LookupReply) {
	k.deliveries.Waiting(rules.ID, req.Transfer, req.Session, reply.Status == ipc.LookupPending)
}

package agent

import (
	"time"

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
	return k.tiers.Ask(rules.ID, k.asked, start.Add(within), anew)
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

// beyond reports whether more may come than an answer has. An answer that a cap cut to nothing, or
// that seems so because blocks were stored while they were pinned, is not what there is.
func beyond(x lookup.Expected, reply *ipc.LookupReply) bool {
	return x.Grows && (reply.Tokens < x.Most || reply.Status == ipc.LookupLeaseCap)
}

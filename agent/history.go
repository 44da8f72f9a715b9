package agent

import (
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// answered remembers a look-up. The peer has its answer.
func (k *lookupSock) answered(req *ipc.LookupRequest, reply *ipc.LookupReply) {
	if k.history == nil {
		return
	}
	fp, hashTokens := pool.Fingerprint(req.Space), uint32(0)
	if fp == (pool.Fingerprint{}) {
		fp = k.fp
	}
	if sp := k.registry.view.Load().spaces[fp]; sp != nil {
		hashTokens = sp.hashTokens
	}
	k.history.Answered(fp, hashTokens, req, reply)
}

// refused remembers the blocks of a save that were not stored.
func (s *session) refused(sections []transfer.Section, status []pool.Status) {
	st := s.seat.Load()
	if st == nil {
		return
	}
	for i := range sections {
		one := &sections[i]
		s.owner.history.Refused(st.space.fp, one.Group, one.Hashes, status)
		status = status[one.Hashes.N:]
	}
}

// world returns the agent as explanations read it; nil if nothing is remembered.
func (a *Agent) world() *history.World {
	if a.cfg.History == nil {
		return nil
	}
	w := &history.World{
		History: a.cfg.History, Spaces: a.registry.explained, Index: a.pool, Memory: a.pool,
		Names: admin.StatusNames, Answers: admin.LookupStatusName, Loads: a.switches.loads.Load,
	}
	if a.tiers != nil {
		w.Ask = func(s pool.SpaceID, group uint8, h pool.Hashes, deadline time.Time) {
			a.tiers.Ask(s, []pool.Asked{{Group: group, Hashes: h, Sparse: true}}, deadline)
		}
	}
	return w
}

// explained returns all spaces, for explanations.
func (r *registry) explained() (out []history.Space) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, sp := range r.spaces {
		one := history.Space{
			Fingerprint: sp.fp, Engines: int(sp.complete.Load()), Model: sp.model, Identity: sp.pairs,
			HashTokens: sp.hashTokens, Groups: sp.groups,
		}
		if rules := sp.open.Load(); rules != nil {
			one.ID, one.Open = rules.ID, true
		}
		out = append(out, one)
	}
	return out
}

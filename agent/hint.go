package agent

import (
	"errors"
	"time"

	"github.com/kvagent/kvagent/agent/delivery"
	"github.com/kvagent/kvagent/agent/hints"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// hint serves HINT, about blocks of the session's own space. Without a registration its
// actions are rejected.
func (s *session) hint(m *ipc.Hint) {
	receipts, answered := hints.Reject(m, "no space is registered"), make(chan struct{})
	defer close(answered) // what is over already is told after that it was deferred
	if rules := s.rules(); rules != nil {
		h := hints.FromMessage(m, rules.ID)
		h.Later = func(r hints.Receipt) {
			<-answered
			s.notify(hints.Message(m.Req, r))
		}
		receipts = s.owner.hints.Told(h)
	} else {
		s.owner.metrics.HintsIgnored.Add(1)
	}
	if len(receipts) > 0 {
		s.notify(hints.Message(m.Req, receipts...))
	}
}

// numbered returns the open space with the pool's number; nil: there is none.
func (r *registry) numbered(s pool.SpaceID) *space {
	for _, sp := range r.view.Load().spaces {
		if rules := sp.open.Load(); rules != nil && rules.ID == s {
			return sp
		}
	}
	return nil
}

// windowed reports whether a group of a space has a sliding window.
func (r *registry) windowed(s pool.SpaceID, group uint8) bool {
	if sp := r.numbered(s); sp != nil {
		rules := sp.open.Load()
		return rules != nil && int(group) < len(rules.Groups) && rules.Groups[group].Window != 0
	}
	return false
}

// hintConfig returns what carries out hints.
func (a *Agent) hintConfig(capacity int64) hints.Config {
	c := hints.Config{
		Memory: a.pool, Capacity: capacity, PinBudget: capacity / 100 * int64(a.cfg.KeepPercent),
		Ranks: a.cfg.Ranks, Now: time.Now,
	}
	if a.tiers != nil {
		c.Raise = a.Raise
	}
	if a.cfg.Peers.Fetch != nil {
		c.Fetch = a.fetchHinted
	}
	return c
}

var errNotFetched = errors.New("the space is not open, or too many fetches run")

// fetchHinted starts to fetch blocks from another agent, as a look-up that names a transfer does.
func (a *Agent) fetchHinted(s pool.SpaceID, name, peer string, chains []hints.Chain) (<-chan struct{}, error) {
	sp := a.registry.numbered(s)
	if sp == nil {
		return nil, errNotFetched
	}
	r := &delivery.Request{
		Peer: peer, Name: name, Fingerprint: sp.fp, Space: s, Epoch: a.pool.Epoch(s), Shards: sp.spec.Shards,
	}
	left := maxFetchBlocks
	for _, c := range chains {
		r.Chains = delivery.Lacking(r.Chains, a.pool, s, c.Group, c.Hashes, 0, a.registry.windowed(s, c.Group), &left)
	}
	if _, known := a.deliveries.Fetching(s, []byte(name), peer, 0); !known {
		a.deliveries.Start(r, 0)
	}
	if ended := a.deliveries.Ended(s, name); ended != nil {
		return ended, nil
	}
	return nil, errNotFetched
}

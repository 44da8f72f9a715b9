package agent

import (
	"context"
	"errors"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/delivery"
	"github.com/kvagent/kvagent/agent/hints"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// Peers connects an agent with those of other nodes. The zero value is an agent on its own.
type Peers struct {
	Address string // host:port where other agents reach this one; empty: they cannot
	// TransferTTL is how long a transfer lasts that no OFFER gave a time; 0: delivery.DefaultTTL.
	TransferTTL time.Duration
	// Fetch brings the blocks of a request from another agent, until nothing more comes or ctx
	// ends. nil: other agents are not asked.
	Fetch func(ctx context.Context, r *delivery.Request) error
	// Deliver tells another agent, without waiting, that a transfer was delivered; nil: none is
	// told.
	Deliver func(peer string, space pool.Fingerprint, name string)
	Report  func() *admin.PeersStatus // nil: an agent on its own
	// Leave ends all fetches, and waits for no other agent; nil: there are none.
	Leave func() error
	// Stop ends the service to other agents before a successor may start; nil: there is none.
	Stop func() error
}

// offer serves OFFER.
func (s *session) offer(m *ipc.Offer) {
	if id, ok := s.openSpace(); ok {
		s.owner.deliveries.Offer(id, m.Name, s.number, m.Tokens, time.Duration(m.TTLMS)*time.Millisecond)
	}
}

// offered serves OFFERED.
func (s *session) offered(m *ipc.Offered) {
	if id, ok := s.openSpace(); ok {
		s.owner.deliveries.Offered(id, m.Name, s.number, m.Tokens)
	}
}

// delivered serves DELIVERED.
func (s *session) delivered(m *ipc.Delivered) {
	if id, ok := s.openSpace(); ok {
		s.owner.deliveries.Delivered(id, m.Name)
	}
}

// openSpace returns the pool's space of the session's registration. A message about a transfer
// without one is counted.
func (s *session) openSpace() (pool.SpaceID, bool) {
	if rules := s.rules(); rules != nil {
		return rules.ID, true
	}
	s.owner.metrics.TransfersIgnored.Add(1)
	return 0, false
}

// committed tells those who wait for blocks of the session's space that some were stored.
func (s *session) committed() {
	if rules := s.rules(); rules != nil {
		s.owner.deliveries.Committed(rules.ID)
	}
}

// expire ends transfers, fetches and hints that have reached their time, until the agent
// ends.
func (a *Agent) expire() {
	tick := time.NewTicker(a.cfg.Limits.Watch)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			a.deliveries.Expire()
			a.hints.Expire()
		case <-a.stop:
			return
		}
	}
}

// Unserved returns nil if everything was served that the schedulers of a space had sent before the
// call. Otherwise it returns a channel that is closed when one of them has caught up: what another
// one told an engine, or another agent, may overtake an OFFER on its way here.
func (a *Agent) Unserved(s pool.SpaceID) <-chan struct{} { return a.registry.unserved(s) }

// unserved is Agent.Unserved.
func (r *registry) unserved(s pool.SpaceID) <-chan struct{} {
	for _, st := range r.view.Load().seats {
		if st.role != ipc.RoleScheduler {
			continue
		}
		if rules := st.space.open.Load(); rules == nil || rules.ID != s {
			continue
		}
		if wait := st.session.conn.Unserved(); wait != nil {
			return wait
		}
	}
	return nil
}

// Transfers returns the agent's transfers, for the listener of other agents.
func (a *Agent) Transfers() *delivery.Table { return a.deliveries }

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

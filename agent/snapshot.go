package agent

import (
	"cmp"
	"encoding/hex"
	"errors"
	"net"
	"slices"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// source returns the functions by which package admin reads the agent.
func (a *Agent) source() admin.Source {
	return admin.Source{
		State: a.state, Engines: a.engines, Spaces: a.spaces, Live: a.Live, Ready: a.Ready,
		Set: a.sessions.set, Reset: a.resetStored, Tiers: a.tiers, Explain: a.world(),
		Hints: a.hints,
	}
}

// Status returns the contents of /status.
func (a *Agent) Status() admin.Status { return a.view.Status() }

// HTTPAddr returns the address on which HTTP listens besides admin.sock, or nil.
func (a *Agent) HTTPAddr() net.Addr {
	if a.web == nil {
		return nil
	}
	return a.web.Addr()
}

// state returns the state of the agent's parts.
func (a *Agent) state() admin.Status {
	s := admin.Status{
		Version: a.cfg.Version, Boot: hex.EncodeToString(a.boot[:]), Since: a.since,
		Draining: a.switches.draining(), Switches: a.switches.state(),
		Sessions: len(a.sessions.list()), Regions: a.memory.mappings.Open(), Jobs: a.sessions.jobs(),
		Stuck: len(a.registry.stuckWorkers()), PendingFDs: a.memory.pendingFDs.Load(), LeaseCap: a.cfg.LeaseBytes,
		Sockets: a.sockets.names(), LookupFaults: lookupFaults(&a.sockets.counts), Pool: a.pool.Stats(),
		Movers: a.movers(), Orphans: admin.Orphans{PIDs: []int{}},
		Sample: admin.SampleStatus{
			Every: a.cfg.VerifySample, LastMismatch: *cmp.Or(a.workers.mismatch.Load(), new(string)),
		},
		Paces: a.workers.pacers.Report(), Hints: admin.HintStatus{Report: a.hints.Report()},
		Events: a.events.Report(), Transfers: admin.TransfersStatus{Report: a.deliveries.Report()},
	}
	s.Engines, s.EnginesComplete = a.registry.countEngines()
	s.Leases, s.LeaseBytes, s.LeasesRevoked = a.ledger.Totals()
	if a.tiers != nil {
		report := a.tiers.Report()
		s.Tiers = &report
	}
	if a.cfg.Peers.Report != nil {
		s.Peers = a.cfg.Peers.Report()
		s.Peers.Address = a.cfg.Peers.Address
	}
	if a.cfg.Orphans != nil {
		s.Orphans = a.cfg.Orphans()
	}
	return s
}

// lookupFaults returns the counters of what went wrong, by name.
func lookupFaults(c *ipc.LookupCounts) map[string]uint64 {
	out := map[string]uint64{"panic": c.Panics.Load(), "unsent": c.Unsent.Load(), "connection": c.Dropped.Load()}
	for reason := range c.Reasons {
		out[ipc.Reason(reason).String()] += c.Reasons[reason].Load() // of a decoder that panics, too
	}
	return out
}

func (r *registry) countEngines() (all, complete int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.engines {
		if e.complete.Load() {
			complete++
		}
	}
	return len(r.engines), complete
}

// engines returns the registered engines, sorted by name.
func (a *Agent) engines() []admin.EngineStatus {
	a.registry.mu.Lock()
	defer a.registry.mu.Unlock()
	out := make([]admin.EngineStatus, 0, len(a.registry.engines))
	for _, e := range a.registry.engines {
		es := admin.EngineStatus{
			Instance: e.instance, Model: e.space.model, Space: hex.EncodeToString(e.space.fp[:]),
			Identity: e.space.pairs,
			Complete: e.complete.Load(), World: e.world, Sessions: []admin.WorkerStatus{},
		}
		es.Leases, es.LeaseBytes, _ = a.ledger.Usage(e.acct)
		for _, st := range append([]*seat{e.scheduler}, e.ranks...) {
			if st != nil {
				es.Sessions = append(es.Sessions, st.status())
			}
		}
		out = append(out, es)
	}
	slices.SortFunc(out, func(x, y admin.EngineStatus) int { return cmp.Compare(x.Instance, y.Instance) })
	return out
}

// status returns a seat's status; registry.mu is held.
func (st *seat) status() admin.WorkerStatus {
	s := st.session
	ws := admin.WorkerStatus{
		Session: s.number, Role: "worker", Rank: st.rank, Shards: st.shards, PID: s.pid, Software: s.software,
		Version: s.conn.Version(), Registered: st.registered, Jobs: s.jobs.count(), Outbox: s.out.depth(), Step: "idle",
	}
	if st.role == ipc.RoleScheduler {
		ws.Role = "scheduler"
	}
	if st.registered {
		ws.Regions = st.regions
	}
	if w := st.worker.Load(); w != nil {
		state := w.State()
		ws.SaveQueue, ws.LoadQueue = state.Save.Queue, state.Load.Queue
	}
	if step, age := st.step(); step != "" {
		ws.Step, ws.StepMS = step, age.Milliseconds()
	}
	return ws
}

// spaces returns the spaces of the registry.
func (a *Agent) spaces() []admin.Space {
	var out []admin.Space
	for _, sp := range a.registry.all() {
		out = append(out, admin.Space{Fingerprint: sp.fp, CacheSpace: a.cacheSpace(sp)})
	}
	return out
}

// all returns all spaces.
func (r *registry) all() []*space {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]*space, 0, len(r.spaces))
	for _, sp := range r.spaces {
		out = append(out, sp)
	}
	return out
}

func (a *Agent) cacheSpace(sp *space) admin.CacheSpace {
	rules := sp.open.Load()
	out := admin.CacheSpace{
		Space: hex.EncodeToString(sp.fp[:]), Model: sp.model, Tenant: sp.pairs["tenant"], Dtype: sp.pairs["dtype"],
		Groups: len(sp.groups), Shards: len(sp.claims),
		Open: rules != nil, Epoch: a.registry.epochOf(sp), Engines: int(sp.complete.Load()), Blocks: -1,
	}
	if rules != nil {
		out.ID, out.Blocks = rules.ID, a.pool.SpaceEntries(rules.ID)
	}
	return out
}

// resetStored starts a new epoch of a space for admin, and returns the space's new state. stored is
// false if the space does not exist or was closed meanwhile, so that nothing of it is stored.
func (a *Agent) resetStored(fp pool.Fingerprint) (now admin.CacheSpace, stored bool, err error) {
	sp := a.registry.space(fp)
	if sp == nil {
		return now, false, nil
	}
	if _, err := a.resetSpace(sp, nil, "the operator"); err != nil {
		if errors.Is(err, errSpaceClosed) {
			err = nil
		}
		return now, false, err
	}
	return a.cacheSpace(sp), true, nil
}

// space returns the space with a fingerprint, or nil.
func (r *registry) space(fp pool.Fingerprint) *space {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.spaces[fp]
}

// answered remembers a look-up. The peer has its answer.
func (k *lookupSock) answered(req *ipc.LookupRequest, reply *ipc.LookupReply) {
	if k.cfg.History == nil {
		return
	}
	fp, hashTokens := pool.Fingerprint(req.Space), uint32(0)
	if fp == (pool.Fingerprint{}) {
		fp = k.fp
	}
	if sp := k.registry.view.Load().spaces[fp]; sp != nil {
		hashTokens = sp.hashTokens
	}
	k.cfg.History.Answered(fp, hashTokens, req, reply)
}

// refused remembers the blocks of a save that were not stored.
func (s *session) refused(sections []transfer.Section, status []pool.Status) {
	st := s.seat.Load()
	if st == nil {
		return
	}
	for i := range sections {
		one := &sections[i]
		s.owner.cfg.History.Refused(st.space.fp, one.Group, one.Hashes, status)
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

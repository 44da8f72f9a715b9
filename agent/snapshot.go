package agent

import (
	"cmp"
	"encoding/hex"
	"errors"
	"net"
	"slices"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// source returns the functions by which package admin reads the agent.
func (a *Agent) source() admin.Source {
	return admin.Source{
		State: a.state, Engines: a.engines, Spaces: a.spaces, Live: a.Live, Ready: a.Ready,
		Set: a.sessions.set, Reset: a.resetStored, Tiers: a.tiers, Tail: a.events.Tail, Explain: a.world(),
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
		Sessions: len(a.sessions.list()), Regions: a.memory.mappings.Open(), Jobs: a.inflight.Count(),
		Stuck: len(a.watchdog.stuckWorkers()), PendingFDs: a.memory.pendingFDs.Load(), LeaseCap: a.cfg.LeaseBytes,
		Sockets: a.sockets.names(), LookupFaults: lookupFaults(a.sockets.counters()), Pool: a.pool.Stats(),
		Movers: a.movers(), Orphans: admin.Orphans{PIDs: []int{}},
		Sample: admin.SampleStatus{Every: a.cfg.VerifySample, LastMismatch: a.workers.mismatches.lastOne()},
		Paces:  a.workers.pacers.Report(), Hints: admin.HintStatus{Report: a.hints.Report()},
		Events: a.events.Report(), Transfers: admin.TransfersStatus{Report: a.deliveries.Report()},
	}
	s.Engines, s.EnginesComplete = a.registry.countEngines()
	s.Leases, s.LeaseBytes, s.LeasesRevoked = a.ledger.Totals()
	if a.tiers != nil {
		report := a.tiers.Report()
		s.Tiers = &report
	}
	if p := a.cfg.Peers; p.Report != nil || p.Address != "" {
		peers := admin.Peers{}
		if p.Report != nil {
			peers = p.Report()
		}
		peers.Address = p.Address
		s.Peers = peers.Status()
	}
	if a.cfg.Orphans != nil {
		s.Orphans = a.cfg.Orphans()
	}
	return s
}

// lookupFaults returns the counters of what went wrong, by name.
func lookupFaults(c ipc.LookupCounters) map[string]uint64 {
	out := map[string]uint64{"panic": c.Panics, "unsent": c.Unsent, "connection": c.Dropped}
	for reason, n := range c.Reasons {
		out[ipc.Reason(reason).String()] += n // of a decoder that panics, too
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
		Version: s.conn.Version(), Registered: st.registered, Jobs: s.jobs.Count(), Outbox: s.out.Depth(), Step: "idle",
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
	if _, err := a.epochs.reset(sp, nil, "the operator"); err != nil {
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

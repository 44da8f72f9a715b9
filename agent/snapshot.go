package agent

import (
	"cmp"
	"encoding/hex"
	"os"
	"slices"
	"time"

	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// Directory returns the socket directory, and the group of its sockets.
func (a *Agent) Directory() (path string, group int) { return a.cfg.Dir, a.cfg.SocketGroup }

// Loads reports whether loads are on.
func (a *Agent) Loads() bool { return a.switches.loads.Load() }

// Metrics returns the agent's counters.
func (a *Agent) Metrics() *report.Metrics { return a.metrics }

// Status returns the agent's state and counters, without what its guests tell.
func (a *Agent) Status() report.Status {
	faults := &a.sockets.counts
	s := report.Status{
		Version: a.cfg.Version, Boot: hex.EncodeToString(a.boot[:]), Since: a.since,
		Draining: a.switches.draining(), Switches: a.switches.state(),
		Sessions: len(a.sessions.list()), Regions: a.memory.open(), Jobs: a.sessions.jobs(),
		Stuck: len(a.registry.stuckWorkers()),
		LookupFaults: map[string]uint64{
			"malformed": faults.Malformed.Load(), "unsent": faults.Unsent.Load(), "connection": faults.Dropped.Load(),
		},
		Pool: a.pool.Stats(), Movers: a.movers(), Abandoned: a.cfg.Abandoned,
		Sample: report.SampleStatus{
			Every: a.cfg.VerifySample, LastMismatch: *cmp.Or(a.workers.mismatch.Load(), new(string)),
		},
		Paces: a.workers.pacers.Report(),
	}
	live, ready := a.Live(), a.Ready()
	s.PID, s.UptimeSeconds, s.Ready = os.Getpid(), time.Since(s.Since).Seconds(), ready == nil
	if err := cmp.Or(live, ready); err != nil {
		s.Problem = err.Error()
	}
	s.EngineList = a.engines()
	s.Engines = len(s.EngineList)
	for i := range s.EngineList {
		if s.EngineList[i].Complete {
			s.EnginesComplete++
		}
	}
	s.EnginesIncomplete, s.BlocksStored = s.Engines-s.EnginesComplete, s.Pool.Entries
	s.Leases, s.LeaseBytes, s.LeasesRevoked = a.ledger.Totals()
	if a.tiers != nil {
		report := a.tiers.Report()
		s.Tiers = &report
	}
	a.metrics.Fill(&s)
	return s
}

// engines returns the registered engines, sorted by name.
func (a *Agent) engines() []report.EngineStatus {
	a.registry.mu.Lock()
	defer a.registry.mu.Unlock()
	out := make([]report.EngineStatus, 0, len(a.registry.engines))
	for _, e := range a.registry.engines {
		es := report.EngineStatus{
			Instance: e.instance, Model: e.space.model, Space: hex.EncodeToString(e.space.fp[:]),
			Identity: e.space.pairs,
			Complete: e.complete.Load(), World: e.world, Sessions: []report.WorkerStatus{},
		}
		es.Leases, es.LeaseBytes = a.ledger.Usage(e.acct)
		for _, st := range append([]*seat{e.scheduler}, e.ranks...) {
			if st != nil {
				es.Sessions = append(es.Sessions, st.status())
			}
		}
		out = append(out, es)
	}
	slices.SortFunc(out, func(x, y report.EngineStatus) int { return cmp.Compare(x.Instance, y.Instance) })
	return out
}

// status returns a seat's status; registry.mu is held.
func (st *seat) status() report.WorkerStatus {
	s := st.session
	ws := report.WorkerStatus{
		Session: s.number, Role: "worker", Rank: st.rank, Shards: st.shards, PID: s.pid, Software: s.software,
		Registered: st.registered, Jobs: s.jobs.count(), Outbox: len(s.out.waiting), Step: "idle",
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

// Spaces returns the spaces that the agent knows.
func (a *Agent) Spaces() []report.Space {
	var out []report.Space
	for _, sp := range a.registry.all() {
		out = append(out, report.Space{
			Fingerprint: sp.fp, CacheSpace: a.cacheSpace(sp), Identity: sp.pairs, HashTokens: sp.hashTokens,
			Descriptions: sp.groups,
		})
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

func (a *Agent) cacheSpace(sp *space) report.CacheSpace {
	rules := sp.open.Load()
	out := report.CacheSpace{
		Space: hex.EncodeToString(sp.fp[:]), Model: sp.model, Tenant: sp.pairs["tenant"], Dtype: sp.pairs["dtype"],
		Groups: len(sp.groups), Shards: len(sp.claims),
		Open: rules != nil, Epoch: a.registry.epochOf(sp), Engines: int(sp.complete.Load()), Blocks: -1,
	}
	if rules != nil {
		out.ID, out.Blocks = rules.ID, a.pool.SpaceEntries(rules.ID)
	}
	return out
}

// space returns the space with a fingerprint, or nil.
func (r *registry) space(fp pool.Fingerprint) *space {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.spaces[fp]
}

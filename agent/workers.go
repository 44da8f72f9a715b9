package agent

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/registration"
	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
	"github.com/kvagent/kvagent/transfer/pace"
)

// workers starts the transfers of registered workers.
type workers struct {
	*Agent
	lanes  map[cudaipc.UUID]*transfer.Lanes // by GPU, zero for CPUs' copies; under registry.mu
	pacers *pace.Devices
	arena  []byte // the pool's, as mapped in this process

	mismatch atomic.Pointer[string] // the last one; nil: there was none
}

func newWorkers(a *Agent) *workers {
	w := &workers{
		Agent: a, lanes: map[cudaipc.UUID]*transfer.Lanes{}, pacers: pace.NewDevices(a.cfg.Pace, a.cfg.CPUPacer),
	}
	w.arena, _ = a.pool.Arena()
	return w
}

// start starts the transfers of a registered worker whose space is open. registry.mu is held.
func (w *workers) start(st *seat) error {
	space, pacer := st.space.open.Load().ID, w.pacers.Of(deviceName(st.gpu))
	started, err := transfer.Start(transfer.Config{
		Owner: func() pool.Owner { return pool.Owner(st.owner.Load()) },
		Peer:  st.peer, Slots: w.pool, Space: space, Spec: st.space.spec,
		Held:      st.layouts,
		Integrity: w.cfg.Integrity, Sampling: transfer.Sampling{
			Every: w.cfg.VerifySample, Seed: binary.LittleEndian.Uint64(w.boot[:]) + st.session.number, Arena: w.arena,
			Mismatch: func(m transfer.Mismatch) { w.mismatched(st, &m) },
		},
		Lanes: w.lanesLocked(st.gpu), Pacer: pacer, Awaited: func() bool { return w.guests.Awaited(space) },
		Refusable: w.tiers == nil, // else tiers below memory are to have what is saved
		Limits:    w.cfg.Limits.Transfer, Complete: st.session.report,
	})
	if err != nil {
		return fmt.Errorf("segments: %w", err)
	}
	st.steps.Store(pacer.Engine())
	st.worker.Store(started)
	return nil
}

// deviceName returns the name of a GPU, or that of the CPUs.
func deviceName(gpu cudaipc.UUID) string {
	if gpu == (cudaipc.UUID{}) {
		return pace.CPU
	}
	return gpu.String()
}

// lanesLocked returns the lanes of a GPU, or those shared by all copies on the CPU, so that copies
// of different GPUs do not wait for each other. They are kept for each GPU from which memory was
// imported. registry.mu is held.
func (w *workers) lanesLocked(gpu cudaipc.UUID) *transfer.Lanes {
	l := w.lanes[gpu]
	if l == nil {
		l = transfer.NewLanes(max(runtime.NumCPU(), 2), w.cfg.Limits.Transfer.SaveAge, nil)
		w.lanes[gpu] = l
	}
	return l
}

// mismatched records and logs that a block's bytes differ between an engine and the pool. The block
// has been dropped already.
func (w *workers) mismatched(st *seat, m *transfer.Mismatch) {
	text := fmt.Sprintf("%s of %s of instance %q: group %d, block %x (the engine's %d): "+
		"the engine's memory has the sum %08x, the pool %08x", report.DirectionNames[m.Kind],
		placeName(st.role, st.rank), st.engine.instance, m.Group, m.Hash, m.Block, m.Engine, m.Slot)
	dated := time.Now().UTC().Format(time.RFC3339) + ": " + text
	w.mismatch.Store(&dated)
	w.rare.Error("a block has other bytes in the engine than in the pool: it is dropped, and the worker's "+
		"next blocks are all checked; the cause is a broken copy, or broken memory",
		zap.String("block", text), zap.Uint64("job", m.Job), zap.String("status", report.StatusNames[m.Status]))
}

// setBudget serves BUDGET, which a registered worker may send once. An agent that cannot keep to it
// ends the session: the engine computes instead.
func (s *session) setBudget(m *ipc.Budget) error {
	st := s.seat.Load()
	if st == nil || st.role != ipc.RoleWorker || st.budgeted {
		return unexpected("BUDGET", "bytes", "no worker is registered, or its budget is set already: allowed once "+
			"after its registration")
	}
	st.budgeted = true
	if m.Bytes == 0 {
		return nil
	}
	if err := s.owner.registry.own(st, int64(m.Bytes)); err != nil {
		s.terminate(endLimit, ipc.ErrCodeLimit, fmt.Errorf("budget: %w", err))
		return ipc.ErrClosed // nothing is served after it
	}
	s.log.Info("budget", zap.String("instance", st.engine.instance), zap.Uint32("rank", st.rank),
		zap.Uint64("bytes", m.Bytes))
	return nil
}

// own makes the engine of a worker the owner of what the worker stores from now on.
func (r *registry) own(st *seat, bytes int64) error {
	if least := registration.LargestBlock(st.sizes); bytes < least {
		return fmt.Errorf("%d bytes, allowed: 0, or at least %d, which one block of this rank has", bytes, least)
	}
	owner, err := r.pool.OpenOwner(st.engine.instance)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	st.budget = bytes
	st.owner.Store(uint32(owner))
	r.limitLocked(st.engine)
	return nil
}

// limitLocked sets an engine's budget in the pool, by whole blocks, so that no rank holds more than
// its own. It does nothing before the sizes of all shards are known: nothing is stored until then.
func (r *registry) limitLocked(e *engine) {
	var limit int64
	var owner uint32
	for _, st := range e.ranks {
		if st == nil || st.owner.Load() == 0 || e.space.open.Load() == nil {
			continue
		}
		if share := registration.WholeBlocks(st.budget, e.space.sizes, st.shards); limit == 0 || share < limit {
			limit, owner = share, st.owner.Load()
		}
	}
	if owner != 0 {
		r.pool.SetBudget(pool.Owner(owner), limit)
	}
}

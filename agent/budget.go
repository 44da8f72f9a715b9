package agent

import (
	"fmt"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/registration"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

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

// limitEnginesLocked sets the budgets that came before a space was open in the pool. It is called
// before the first worker of the space can store anything.
func (r *registry) limitEnginesLocked(sp *space) {
	for _, e := range r.engines {
		if e.space == sp {
			r.limitLocked(e)
		}
	}
}

// disownLocked ends a worker's part in its engine's budget. What it stored stays the engine's.
func (r *registry) disownLocked(st *seat) {
	if owner := st.owner.Load(); owner != 0 {
		r.pool.CloseOwner(pool.Owner(owner))
	}
}

package agent

import (
	"fmt"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/transfer"
)

// startWorker starts the transfers of a registered worker, whose space is open. registry.mu is held.
func (a *Agent) startWorker(st *seat) error {
	w, err := transfer.Start(transfer.Config{
		Device: a.device, Peer: st.peer, Slots: a.pool, Space: st.space.open.Load().ID, Spec: st.space.spec,
		Shard: uint8(st.shard), Layout: st.layout, Integrity: a.cfg.Integrity, Sampling: a.sampling(st), Lanes: a.lanesLocked(st.gpu),
		Limits: a.cfg.Limits.Transfer, Complete: st.session.complete,
	})
	if err != nil {
		a.log.Error("worker not started", zap.String("instance", st.engine.instance), zap.Uint32("rank", st.rank), zap.Error(err))
		return fmt.Errorf("segments: %w", err)
	}
	st.worker.Store(w)
	return nil
}

// lanesLocked are the lanes of a GPU, or of those whose copies the processors do: who copies from one does not wait for another's. There are as many as GPUs
// from which memory was imported. registry.mu is held.
func (a *Agent) lanesLocked(gpu cudaipc.UUID) *transfer.Lanes {
	l := a.lanes[gpu]
	if l == nil {
		l = transfer.NewLanes(a.cfg.Lanes, a.cfg.Limits.Transfer.SaveAge, nil)
		a.lanes[gpu] = l
	}
	return l
}

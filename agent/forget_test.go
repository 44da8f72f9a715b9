package agent

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// keptPool is a pool that has entries of an earlier agent.
type keptPool struct {
	pool.Memory
	forgotten atomic.Int32
	fails     atomic.Bool
}

func (p *keptPool) Forget(pool.Fingerprint) error {
	p.forgotten.Add(1)
	if p.fails.Load() {
		return errors.New("no")
	}
	return nil
}

// A reset before the pool's space is open applies to the blocks of the space that an earlier agent
// stored, and is acknowledged only when they are gone.
func TestResetBeforeTheSpaceIsOpenForgets(t *testing.T) {
	r := newRig(t)
	kept := &keptPool{Memory: r.agent.pool}
	r.agent.registry.mu.Lock()
	r.agent.registry.pool = kept
	r.agent.registry.mu.Unlock()
	reg := register("tp2")
	reg.World, reg.Shards = 2, 2
	a := r.dial()
	a.registered(a.registerWorker(reg))
	a.send(&ipc.Reset{Req: 3})
	if got := next[*ipc.ResetDone](a); got.Status != ipc.RegDone || kept.forgotten.Load() != 1 {
		t.Errorf("%+v, forgotten %d times", got, kept.forgotten.Load())
	}
	kept.fails.Store(true)
	a.send(&ipc.Reset{Req: 4})
	if got := next[*ipc.ResetDone](a); got.Status == ipc.RegDone {
		t.Errorf("%+v, though the pool has not forgotten", got)
	}
}

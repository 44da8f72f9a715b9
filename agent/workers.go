package agent

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/admin"
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

// mismatchEvery is how often a mismatch is logged at most; what comes between is counted in the
// next line.
const mismatchEvery = 10 * time.Second

// mismatches are what is known of blocks that did not match.
type mismatches struct {
	mu     sync.Mutex
	last   string // empty: there was none
	logged time.Time
	silent int // since then
}

// show keeps a mismatch, and says whether it is to be logged and how many were not before it.
func (m *mismatches) show(text string, now time.Time) (log bool, silent int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last = text
	if !m.logged.IsZero() && now.Sub(m.logged) < mismatchEvery {
		m.silent++
		return false, 0
	}
	silent, m.logged, m.silent = m.silent, now, 0
	return true, silent
}

func (m *mismatches) lastOne() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last
}

// sampling is the end-to-end check of a worker's blocks.
func (a *Agent) sampling(st *seat) transfer.Sampling {
	return transfer.Sampling{
		Every: a.cfg.VerifySample, Seed: binary.LittleEndian.Uint64(a.boot[:8]) + uint64(st.peer), Arena: a.arena,
		Mismatch: func(m transfer.Mismatch) { a.mismatch(st, &m) },
	}
}

// mismatch is the alarm: bytes went wrong between an engine and the pool, and nothing else has
// noticed. The block is given up already.
func (a *Agent) mismatch(st *seat, m *transfer.Mismatch) {
	op := [...]string{transfer.Save: "save", transfer.Load: "load"}[m.Kind]
	hash, engine, slot := hex.EncodeToString(m.Hash), fmt.Sprintf("%08x", m.Engine), fmt.Sprintf("%08x", m.Slot)
	text := fmt.Sprintf("%s of %s of instance %q: group %d, block %s (the engine's %d): "+
		"the engine's memory has the sum %s, the pool %s",
		op, placeName(st.role, st.rank), st.engine.instance, m.Group, hash, m.Block, engine, slot)
	now := time.Now()
	log, silent := a.mismatches.show(fmt.Sprintf("%s: %s", now.UTC().Format(time.RFC3339), text), now)
	if !log {
		return
	}
	a.log.Error("a block has other bytes in the engine than in the pool: it is given up, and the worker's next blocks are "+
		"all checked; the cause is a copy, or memory, that is broken",
		zap.String("op", op), zap.String("instance", st.engine.instance), zap.Uint32("rank", st.rank),
		zap.Uint8("group", m.Group), zap.String("hash", hash),
		zap.Uint32("block", m.Block), zap.String("sum_in_engine", engine), zap.String("sum_in_pool", slot),
		zap.Uint64("job", m.Job),
		zap.String("status", admin.StatusNames[m.Status]), zap.Int("not_logged_before", silent))
}

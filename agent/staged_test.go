package agent

import (
	"sync/atomic"
	"testing"

	"github.com/kvagent/kvagent/ipc"
)

// stages declares the stage of each of a client's segments.
func (c *client) stages(of ...byte) {
	c.t.Helper()
	m := &ipc.Stages{Off: c.engine.StageWords(), Count: 2}
	for _, stage := range of {
		m.List = append(m.List, stage, 0)
	}
	c.send(m)
}

// staged sends a load by stages, which counts in word 1.
func (c *client) staged(epoch uint32, lease uint64, hashes []byte, firstBlock uint32) {
	c.t.Helper()
	c.job++
	atomic.StoreUint64(c.engine.StageWord(1), 0)
	c.send(&ipc.StagedLoad{Job: c.job, Epoch: epoch, Event: ipc.None, Lease: lease, Word: 1,
		Sections: []ipc.Section{section(hashes, firstBlock)}})
}

// TestStagedLoadOfCells loads two shards, the second one as the first stage.
func TestStagedLoadOfCells(t *testing.T) {
	r := newRig(t, withPool(8<<20))
	w := r.dial()
	answer := w.registered(w.registerCells(register("cells")))
	for b := range 2 {
		w.fill(b, byte(b))
		w.fill(testBlocks/2+b, byte(10+b))
	}
	if got := w.save(answer.Epoch, chain(1, 2), 0); !all(got, blockOK) {
		t.Fatalf("save %v", got)
	}
	w.stages(1, 0)
	w.staged(answer.Epoch, 0, chain(1, 2), 4)
	if got := w.done(w.job); !all(got, blockOK) {
		t.Errorf("load by stages %v", got)
	}
	for b := range 2 {
		if !w.filled(4+b, byte(b)) || !w.filled(testBlocks/2+4+b, byte(10+b)) {
			t.Errorf("block %d has other bytes", b)
		}
	}
	if words := [2]uint64{atomic.LoadUint64(w.engine.StageWord(0)), atomic.LoadUint64(w.engine.StageWord(1))}; words !=
		[2]uint64{0, 2} {
		t.Errorf("the words are %v, want 0 and 2", words)
	}
}

// TestHeldStagedLoad expects a load by stages to wait for blocks that its lease promises, as others
// do, and to be copied by stages then.
func TestHeldStagedLoad(t *testing.T) {
	_, f, _, w, lease := held(t)
	w.stages(0)
	w.staged(1, lease, chain(1, 8), 40)
	w.sync()
	f.Switch(false)
	for range 2 {
		next[*ipc.Done](w)
	}
	if n := atomic.LoadUint64(w.engine.StageWord(1)); n != 1 {
		t.Errorf("the word is %d, want 1", n)
	}
}

// TestStagesBelongToARegistration declares stages in each of two registrations of a session.
func TestStagesBelongToARegistration(t *testing.T) {
	r := newRig(t)
	w := r.dial()
	reg := register("again")
	answer := w.registered(w.registerWorker(reg))
	w.stages(0)
	w.fill(0, 7)
	if got := w.save(answer.Epoch, chain(1, 1), 0); !all(got, blockOK) {
		t.Fatalf("save %v", got)
	}
	w.unregister()
	answer = w.again(reg)
	w.staged(answer.Epoch, 0, chain(1, 1), 3)
	if got := w.done(w.job); !all(got, blockInvalid) {
		t.Errorf("before the stages are declared again: %v, want invalid", got)
	}
	w.stages(0)
	w.staged(answer.Epoch, 0, chain(1, 1), 3)
	if got := w.done(w.job); !all(got, blockOK) || !w.filled(3, 7) {
		t.Errorf("after: %v, want ok", got)
	}
}

// TestStagesOfAScheduler expects a session without a worker's registration to be ended.
func TestStagesOfAScheduler(t *testing.T) {
	r := newRig(t)
	s := r.dial()
	s.send(schedulerOf(register("one")))
	s.registered(next[*ipc.Registered](s))
	s.send(&ipc.Stages{Count: 1, List: []byte{0, 0}})
	if got := next[*ipc.Error](s); got.Code != ipc.ErrCodeMalformed {
		t.Errorf("%+v, want code %d", got, ipc.ErrCodeMalformed)
	}
}

// TestStagedLoadWhileLoadsAreOff expects it to be answered as any load.
func TestStagedLoadWhileLoadsAreOff(t *testing.T) {
	r := newRig(t)
	w := r.dial()
	answer := w.registered(w.registerWorker(register("off")))
	w.stages(0)
	w.sync()
	r.agent.switches.loads.Store(false)
	w.staged(answer.Epoch, 0, chain(1, 1), 3)
	if got := w.done(w.job); !all(got, blockOff) {
		t.Errorf("%v, want off", got)
	}
}

package agent

import (
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// RESET: nothing stored before is found, older saves are stale, and the other sessions of the space
// are notified.
func TestReset(t *testing.T) {
	r := newRig(t)
	reg := register("a")
	reg.LookupName = "look"
	scheduler, w, answer := r.joinEngine(reg)
	elsewhere := register("b")
	elsewhere.Identity[1].Value = "another model"
	_, stranger, _ := r.joinEngine(elsewhere)
	w[0].save(1, chain(1, 4), 0)
	scheduler.send(&ipc.Reset{Req: 4})
	if got := next[*ipc.ResetDone](scheduler); got.Status != ipc.RegDone || got.Epoch != 2 || got.Req != 4 {
		t.Fatalf("%+v", got)
	}
	if got := next[*ipc.Epoch](w[0]); got.Epoch != 2 {
		t.Errorf("EPOCH %+v", got)
	}
	if got := ask(t, r.asker("look"),
		ipc.LookupRequest{Tokens: 1000, HashLen: 32, Hashes: chain(1, 4)}); got.Tokens != 0 {
		t.Errorf("look-up after the reset: %+v", got)
	}
	if got := w[0].save(answer.Epoch, chain(1, 4), 0); !all(got, blockStale) {
		t.Errorf("save with the old epoch: %v", got)
	}
	if got := w[0].save(2, chain(1, 4), 0); !all(got, blockOK) {
		t.Errorf("save with the new epoch: %v", got)
	}
	stranger[0].sync() // would fail on an EPOCH it does not expect; those are passed over, so look at them
	if got := stranger[0].save(1, chain(1, 1), 0); !all(got, blockOK) {
		t.Errorf("another space was reset too: %v", got)
	}
	lone := r.dial()
	lone.send(&ipc.Reset{Req: 5})
	if got := next[*ipc.ResetDone](lone); got.Status != ipc.RegRefused {
		t.Errorf("reset without a registration: %+v", got)
	}
}

// slowReset is a pool that takes its time over a reset.
type slowReset struct {
	pool.Memory
	begun, end chan struct{}
}

func (p *slowReset) ResetSpace(id pool.SpaceID) (uint32, error) {
	close(p.begun)
	<-p.end
	return p.Memory.ResetSpace(id)
}

// A reset takes as long as the pool is large. Meanwhile engines come and go as ever.
func TestResetHoldsNobodyUp(t *testing.T) {
	r := newRig(t)
	scheduler, _, _ := r.joinEngine(register("a"))
	_, other, _ := r.joinEngine(register("b"))
	slow := &slowReset{r.agent.pool, make(chan struct{}), make(chan struct{})}
	r.agent.registry.mu.Lock()
	r.agent.registry.pool = slow
	r.agent.registry.mu.Unlock()
	scheduler.send(&ipc.Reset{Req: 4})
	<-slow.begun
	check(t, other[0].conn.Close())
	end := sync.OnceFunc(func() { close(slow.end) })
	defer end() // for a failed test
	r.waitFor("an engine that died during a reset is cleaned up before its end",
		func(s admin.Status) bool { return s.Sessions <= 3 })
	end()
	if got := next[*ipc.ResetDone](scheduler); got.Status != ipc.RegDone || got.Epoch != 2 {
		t.Errorf("%+v", got)
	}
}

// Switches act at once, are sent to all sessions, and can be switched back.
func TestSwitches(t *testing.T) {
	r := newRig(t)
	reg := register("a")
	reg.LookupName = "look"
	_, w, _ := r.joinEngine(reg)
	look := r.asker("look")
	q := ipc.LookupRequest{Tokens: 1000, HashLen: 32, Hashes: chain(1, 2)}
	w[0].save(1, chain(1, 2), 0)
	fresh := r.dial()
	if got := next[*ipc.Switches](fresh); !got.Loads || !got.Saves {
		t.Fatalf("after WELCOME: %+v", got)
	}
	off, on := false, true
	r.agent.Set(&off, nil)
	if got := next[*ipc.Switches](fresh); got.Loads || !got.Saves {
		t.Errorf("loads off: %+v", got)
	}
	if got := w[0].load(1, 0, chain(1, 2), 4); !all(got, blockOff) {
		t.Errorf("load with loads off: %v", got)
	}
	if got := ask(t, look, q); got.Status != ipc.LookupOff || got.Tokens != 0 {
		t.Errorf("look-up with loads off: %+v", got)
	}
	if got := w[0].save(1, chain(2, 2), 0); !all(got, blockOK) {
		t.Errorf("save with loads off: %v", got)
	}
	r.agent.Set(&on, &off)
	if got := w[0].save(1, chain(3, 2), 0); !all(got, blockOff) {
		t.Errorf("save with saves off: %v", got)
	}
	if got := w[0].load(1, 0, chain(2, 2), 4); !all(got, blockOK) {
		t.Errorf("load with loads on again: %v", got)
	}
	r.agent.Set(nil, &on)
	if got := ask(t, look, q); got.Tokens != 2*testBlockTokens {
		t.Errorf("look-up with loads on again: %+v", got)
	}
}

// CANCELLED comes after the job's DONE, once for each CANCEL, for a job that has ended or never
// was too.
func TestCancel(t *testing.T) {
	r := newRig(t)
	_, w, _ := r.joinEngine(register("a"))
	c := w[0]
	c.send(&ipc.Save{Job: 7, Epoch: 1, Step: 50, Event: ipc.None, Revoke: ipc.None,
		Sections: []ipc.Section{section(chain(1, 2), 0)}})
	c.send(&ipc.Cancel{Job: 7})
	c.send(&ipc.Cancel{Job: 7})
	done := next[*ipc.Done](c)
	if done.Job != 7 || !all(done.Status, blockCancelled) {
		t.Errorf("%+v", done)
	}
	for range 2 {
		if got := next[*ipc.Cancelled](c); got.Job != 7 {
			t.Errorf("%+v", got)
		}
	}
	c.send(&ipc.Cancel{Job: 99})
	if got := next[*ipc.Cancelled](c); got.Job != 99 {
		t.Errorf("%+v", got)
	}
}

// A full queue answers busy at once, for each block; the engine's jobs before it go on.
func TestFullQueueIsBusy(t *testing.T) {
	r := newRig(t, withConfig(func(c *Config) {
		c.Limits.Transfer = DefaultLimits.Transfer
		c.Limits.Transfer.Queue = 2
	}))
	_, w, _ := r.joinEngine(register("a"))
	c := w[0]
	if c.welcome.MaxQueue != 2 {
		t.Errorf("WELCOME says a queue of %d, want 2", c.welcome.MaxQueue)
	}
	for job := range uint64(20) {
		c.send(&ipc.Save{Job: job, Epoch: 1, Step: 1, Event: ipc.None, Revoke: ipc.None,
			Sections: []ipc.Section{section(chain(byte(job), 3), 0)}})
	}
	busy := 0
	for busy < 17 { // 2 wait, and 1 may be under way
		if done := next[*ipc.Done](c); !all(done.Status, blockBusy) || len(done.Status) != 3 {
			t.Fatalf("%+v", done)
		}
		busy++
	}
	c.stream.SetStep(1)
	for range 20 - busy {
		if done := next[*ipc.Done](c); !all(done.Status, blockOK) && !all(done.Status, blockBusy) {
			t.Errorf("%+v", done)
		}
	}
}

// A worker whose step gets too old fails Live, which names it, and recovers when it moves.
func TestLiveNamesStuckWorker(t *testing.T) {
	r := newRig(t, withConfig(func(c *Config) {
		c.Limits.Stuck = 50 * time.Millisecond
	}))
	_, w, _ := r.joinEngine(register("slow engine"))
	if err := r.agent.Live(); err != nil {
		t.Fatalf("stuck from the start: %v", err)
	}
	w[0].send(&ipc.Save{Job: 7, Epoch: 1, Step: 5, Event: ipc.None, Revoke: ipc.None,
		Sections: []ipc.Section{section(chain(1, 2), 0)}})
	r.waitFor("the worker is stuck", func(admin.Status) bool { return r.agent.Live() != nil })
	want := `rank 0 of instance "slow engine"`
	if err := r.agent.Live(); !contains(err, want) || !contains(err, "save job 7") {
		t.Errorf("%v, want one that names %s", err, want)
	}
	w[0].stream.SetStep(5)
	if got := w[0].done(7); !all(got, blockOK) {
		t.Errorf("save: %v", got)
	}
	r.waitFor("the worker moves", func(admin.Status) bool { return r.agent.Live() == nil })
}

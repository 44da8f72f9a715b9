package mockengine

import (
	"math/rand/v2"
	"testing"
	"time"
)

// turnUntil makes turns until ok, and fails if it never comes.
func turnUntil(t *testing.T, e *Engine, what string, ok func() bool) {
	t.Helper()
	end := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(end) {
			t.Fatalf("%s: never", what)
		}
		e.arrive()
		e.poll()
		e.expire()
		e.abort()
		e.turn()
	}
}

func prompt(from, n int) (ids []uint64) {
	for i := range n {
		ids = append(ids, uint64(1000*from+i))
	}
	return ids
}

// stored checks every block the fake agent has against what must be under its key: over the true
// tokens of some request, and with its true bytes.
func (f *fakeAgent) stored(t *testing.T, e *Engine, requests []Request) (blocks int) {
	t.Helper()
	f.pending.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	seen := make(map[cacheKey]bool)
	for _, spec := range requests {
		r := newRequest(spec, &e.cfg, 0)
		r.nt = len(r.truth)
		for g := range e.cfg.Groups {
			size := e.cfg.blockTokens(g)
			for b := range len(r.truth) / size {
				k := e.key(r, g, b)
				if bytes := f.mu.stored[k]; bytes != nil && !seen[k] {
					seen[k] = true
					bases, _ := e.workers.shapes[g].appendBase(nil, startChain(e.parent(r, b*scale(g))), 0,
						r.truth[b*size:(b+1)*size])
					if n := wrongStored(e.workers, g, bytes, bases); n > 0 {
						t.Errorf("request %d, group %d: block %d was saved with %d bytes of stale tokens",
							r.ID, g, b, n)
					}
				}
			}
		}
	}
	if n := len(f.mu.stored) - len(seen); n > 0 {
		t.Errorf("%d blocks are stored under a hash that no request's tokens have", n)
	}
	return len(seen)
}

func wrongStored(w *Workers, g int, bytes [][]byte, bases []uint64) (n int) {
	for i, r := range w.ranks {
		b := bytes[i]
		for s := range r.segments {
			n += wrong(b[:r.segments[s].bytes], bases, r.salts[g][s])
			b = b[r.segments[s].bytes:]
		}
	}
	return n
}

// answers are requests whose answers fill several blocks.
func answers(n int) (requests []Request) {
	for i := range n {
		requests = append(requests, Request{ID: uint64(i), At: float64(i), Prompt: prompt(i, 1+i%3), Output: 90 + i})
	}
	return requests
}

func TestSavedBlocksAreWhole(t *testing.T) {
	e, f := newTestEngine(t, small(200))
	requests := answers(6)
	e.Add(requests...)
	finishAll(t, e, f, len(requests))
	if n := f.stored(t, e, requests); n < 30 {
		t.Errorf("only %d blocks were saved", n)
	}
}

// Answers are as long as asked for.
func TestOutputsAreWhole(t *testing.T) {
	for _, cfg := range []Config{small(40), small(400)} {
		e, f := newTestEngine(t, cfg)
		requests := answers(8)
		e.Add(requests...)
		for _, o := range finishAll(t, e, f, len(requests)) {
			if want := requests[o.ID].Output; o.Output != want {
				t.Errorf("request %d with %d blocks: %d tokens of an answer, want %d", o.ID, cfg.Blocks, o.Output, want)
			}
		}
	}
}

func TestPreemptedIsLookedUpAgain(t *testing.T) {
	e, f := newTestEngine(t, small(40))
	requests := answers(8)
	e.Add(requests...)
	turnUntil(t, e, "a load", func() bool {
		f.pending.Wait() // what is saved is there before its request can be preempted
		return e.stats.BlocksLoaded > 0 || len(e.waiting)+len(e.loading)+len(e.running)+len(e.arrivals) == 0
	})
	finishAll(t, e, f, len(requests))
	if e.stats.Preemptions == 0 {
		t.Fatal("no request was preempted")
	}
	if e.stats.BlocksLoaded == 0 {
		t.Error("a preempted request did not get its blocks back from the agent")
	}
	f.stored(t, e, requests)
}

// A request that waits for room is looked up once, not in every step.
func TestWaitingIsLookedUpOnce(t *testing.T) {
	cfg := small(40)
	cfg.Groups, cfg.MaxRunning = 1, 4
	e, f := newTestEngine(t, cfg)
	e.Add(Request{ID: 1, Prompt: prompt(1, 37), Output: 30})
	turnUntil(t, e, "prefilled", func() bool { return len(e.running) == 1 && e.running[0].nt > 37*16 })
	before := f.mu.asked
	e.Add(Request{ID: 2, At: e.clock, Prompt: prompt(2, 25), Output: 5})
	turnUntil(t, e, "waiting for long", func() bool { return len(e.waiting) == 1 && e.running[0].nt > 37*16+20 })
	if n := f.mu.asked - before; n != 1 {
		t.Errorf("%d look-ups of a request that waits for blocks, want 1", n)
	}
	finishAll(t, e, f, 2)
}

func TestLastTokenIsNeverLoaded(t *testing.T) {
	e, f := parked(t, small(60), Request{})
	f.open()
	finishAll(t, e, f, 2)
	if n := len(f.mu.loads); n != 1 {
		t.Fatalf("%d loads, want 1", n)
	}
	if n := len(f.mu.loads[0].Sections[0].Blocks); n != 9 {
		t.Errorf("a prompt of 10 whole blocks loaded %d: all but the one with its last token are 9", n)
	}
}

// parked makes an engine with one request whose 9 blocks are stored and whose load is held by the
// agent.
func parked(t *testing.T, cfg Config, spec Request) (*Engine, *fakeAgent) {
	t.Helper()
	cfg.Groups = 1
	e, f := newTestEngine(t, cfg)
	spec.ID, spec.At, spec.Prompt, spec.Output = 2, 1e6, prompt(1, 10), 4
	e.Add(Request{ID: 1, Prompt: spec.Prompt, Output: 1})
	e.Run(-1)
	e.Drain(10 * time.Second)
	f.pending.Wait()
	e.pool.forgetAll()
	f.deaf = true
	e.Add(spec)
	e.Run(1e6) // not yet
	return e, f
}

func TestAbortWhileLoadingKeepsPins(t *testing.T) {
	e, f := parked(t, small(60), Request{Abort: Abort{When: Loading}})
	turnUntil(t, e, "abort", func() bool { return len(e.outcomes) == 2 })
	if n := e.BlocksInUse(); n != 9 {
		t.Errorf("%d blocks are held after the abort of a load of 9 that was not reported: "+
			"the agent may still write to them", n)
	}
	f.open()
	finishAll(t, e, f, 2)
}

func TestAbortWhileSavingKeepsPins(t *testing.T) {
	cfg := small(60)
	cfg.Groups = 1
	e, f := newTestEngine(t, cfg)
	f.lag = 100 * time.Millisecond
	e.Add(Request{ID: 1, Prompt: prompt(1, 10), Output: 50, Abort: Abort{When: Saving}})
	turnUntil(t, e, "abort", func() bool { return len(e.outcomes) == 1 })
	if e.Jobs() == 0 || e.BlocksInUse() == 0 {
		t.Errorf("%d jobs hold %d blocks after the abort of a request with saves under way", e.Jobs(), e.BlocksInUse())
	}
	finishAll(t, e, f, 1)
}

func TestAbortWhileWaitingGivesItsLeaseBack(t *testing.T) {
	cfg := small(60)
	cfg.Groups, cfg.MaxRunning = 1, 4
	e, f := parked(t, cfg, Request{Abort: Abort{When: Waiting}})
	late := e.arrivals[0]
	e.arrivals = []Request{{ID: 3, At: e.clock, Prompt: prompt(3, 50), Output: 100}}
	turnUntil(t, e, "prefilled", func() bool { return len(e.running) == 1 && e.running[0].nt > 50*16+40 })
	late.At = e.clock
	e.Add(late)
	turnUntil(t, e, "abort", func() bool { return len(e.outcomes) == 2 })
	if f.mu.lease == 0 || len(f.mu.leases) != 0 {
		t.Errorf("%d of %d leases are left after the abort of a waiting request", len(f.mu.leases), f.mu.lease)
	}
	f.open()
	finishAll(t, e, f, 3)
}

// A load that comes too late is failed as a whole; its blocks stay pinned until the fence, not
// until the deadline.
func TestLateLoadKeepsPins(t *testing.T) {
	e, f := parked(t, small(60), Request{})
	clock := time.Now()
	e.now = func() time.Time { return clock }
	turnUntil(t, e, "load", func() bool { return len(e.loading) == 1 && e.loading[0].load != nil })
	clock = clock.Add(loadDeadline)
	turnUntil(t, e, "end", func() bool { return len(e.outcomes) == 2 && len(e.jobs.saves) == 0 })
	if n := e.BlocksInUse(); n != 9 {
		t.Errorf("%d blocks are held after the deadline of a load of 9 that was not reported: a deadline is no fence",
			n)
	}
	f.open()
	out := finishAll(t, e, f, 2)
	if out[1].Pool != 0 || e.stats.LoadsLate != 1 {
		t.Errorf("a load that was given up counts %d blocks from the pool, %d late loads", out[1].Pool,
			e.stats.LoadsLate)
	}
}

// A block that is not delivered costs those after it, and the request asks no more.
func TestFailedBlockKeepsThePrefix(t *testing.T) {
	for _, gone := range []int{0, 4} {
		e, f := parked(t, small(60), Request{})
		e.arrive()
		turnUntil(t, e, "load", func() bool { return len(f.mu.loads) == 1 })
		delete(f.mu.stored, cacheKey{0, Hash(f.mu.loads[0].Sections[0].Hashes[gone*32 : gone*32+32])})
		f.mu.asked = 0
		f.open()
		out := finishAll(t, e, f, 2)
		if out[1].Pool != gone {
			t.Errorf("block %d of a load failed: %d blocks were used, want %d", gone, out[1].Pool, gone)
		}
		if n := len(f.mu.loads); n != 1 {
			t.Errorf("block %d of a load failed: %d loads, want 1", gone, n)
		}
	}
}

// Saves in the way of a running request are taken back by their words; a word is used again only
// after the report.
func TestPressureRevokesSaves(t *testing.T) {
	cfg := small(40)
	cfg.Groups = 1
	e, f := newTestEngine(t, cfg)
	f.lag = 300 * time.Millisecond
	e.Add(Request{ID: 1, Prompt: prompt(1, 30), Output: 1}, Request{ID: 2, Prompt: prompt(2, 30), Output: 20})
	finishAll(t, e, f, 2)
	if e.stats.SavesRevoked == 0 {
		t.Error("no save was revoked")
	}
	if e.stats.Preemptions != 0 {
		t.Errorf("%d preemptions where saves could be revoked", e.stats.Preemptions)
	}
	if f.mu.revoked == 0 {
		t.Error("the agent saw no revocation")
	}
}

// The second request finds what the first computes in the same step.
func TestPublishedInTheSameStep(t *testing.T) {
	cfg := small(60)
	cfg.StepTokens = 1024
	e, f := newTestEngine(t, cfg)
	p := prompt(1, 8)
	e.Add(Request{ID: 1, Prompt: p, Output: 5}, Request{ID: 2, Prompt: p, Output: 5})
	if out := finishAll(t, e, f, 2); out[0].Own+out[1].Own != 6 {
		t.Errorf("the second request found %d blocks, want 6", out[0].Own+out[1].Own)
	}
}

// busy puts the cursor back, so nothing is left out.
func TestBusySaveIsTriedAgain(t *testing.T) {
	cfg := small(100)
	cfg.Groups = 1
	e, f := newTestEngine(t, cfg)
	f.busy = 0.5
	requests := []Request{{ID: 1, Prompt: prompt(1, 20), Output: 300}}
	e.Add(requests...)
	finishAll(t, e, f, 1)
	if n := f.stored(t, e, requests); n < 25 {
		t.Errorf("%d blocks stored of 39 with half of the saves busy", n)
	}
}

// The oracle is alive: an agent that breaks the rules is found out.
func TestOracleSeesStaleSave(t *testing.T) {
	cfg := small(60)
	cfg.KernelLag = 3 * time.Millisecond
	e, f := newTestEngine(t, cfg)
	f.noWait = true
	rng := rand.New(rand.NewPCG(1, 1))
	e.Add(conversations(rng, 100, 12)...)
	e.OnWrong = nil
	e.Run(-1)
	e.Drain(10 * time.Second)
	if e.stats.WrongBytes == 0 {
		t.Error("an agent that does not wait for the step was not found out")
	}
}

func TestOracleSeesLateLoad(t *testing.T) {
	cfg := small(20)
	cfg.Groups = 1
	e, f := newTestEngine(t, cfg)
	spec := Request{ID: 1, Prompt: prompt(1, 10), Output: 1}
	e.Add(spec)
	e.Run(-1)
	e.Drain(10 * time.Second)
	e.pool.forgetAll()
	f.late, f.deaf, f.lag = make(chan struct{}), true, time.Hour
	e.OnWrong = nil
	e.Add(Request{ID: 2, At: 1e6, Prompt: spec.Prompt, Output: 4, Abort: Abort{When: Loading}},
		Request{ID: 3, At: 1e6, Prompt: prompt(3, 14), Output: 60, SkipSave: true})
	e.Run(1e6) // not yet
	turnUntil(t, e, "abort", func() bool { return len(e.outcomes) == 2 })
	f.open()
	turnUntil(t, e, "blocks in use again", func() bool { return len(e.running) == 1 && e.running[0].nt > 14*16+20 })
	close(f.late)
	f.pending.Wait()
	e.Run(-1)
	e.Drain(10 * time.Second)
	if e.stats.WrongBytes == 0 {
		t.Error("an agent that writes after its cancel was acknowledged was not found out")
	}
}

package mockengine

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func testSeed(t *testing.T) uint64 {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("KVAGENT_TEST_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		seed = n
	}
	t.Logf("seed %d (KVAGENT_TEST_SEED repeats it)", seed)
	return seed
}

// small is a configuration with everything on: blocks of 16 tokens, 2 ranks, 2 groups.
func small(blocks int) Config {
	return Config{
		Name: "test", Model: "m", Seed: 1, Ranks: 2, Blocks: blocks, BlockTokens: 16, Groups: 2,
		BlockBytes: 512, StepTokens: 64, MaxRunning: 8, KernelLag: 50 * time.Microsecond,
	}
}

func newTestEngine(t *testing.T, cfg Config) (*Engine, *fakeAgent) {
	t.Helper()
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	w, err := NewWorkers(&cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	f := newFakeAgent(t, w, cfg.Seed)
	e := NewEngine(cfg, f, w)
	e.OnWrong = func(s string) { t.Log(s) }
	return e, f
}

// forgetAll empties the prefix cache; blocks in use stay in use.
func (p *blockPool) forgetAll() {
	for id := range p.blocks {
		p.forget(BlockID(id))
	}
}

// conversations draws n requests in which later turns repeat earlier ones and go on.
func conversations(rng *rand.Rand, n, maxBlocks int) []Request {
	var past [][]uint64
	requests := make([]Request, n)
	next := uint64(1)
	for i := range requests {
		var prompt []uint64
		if len(past) > 0 && rng.IntN(4) > 0 {
			p := past[rng.IntN(len(past))]
			prompt = append(prompt, p[:1+rng.IntN(len(p))]...)
		}
		for k := 1 + rng.IntN(4); k > 0 && len(prompt) < maxBlocks; k-- {
			prompt = append(prompt, next)
			next++
		}
		past = append(past, prompt)
		requests[i] = Request{ID: uint64(i), At: float64(i) * 15, Prompt: prompt, Output: 1 + rng.IntN(50)}
	}
	return requests
}

// finishAll runs to the end and checks what must hold after any run.
func finishAll(t *testing.T, e *Engine, f *fakeAgent, want int) []Outcome {
	t.Helper()
	e.Run(-1)
	if !e.Drain(10 * time.Second) {
		t.Fatalf("%d jobs are not over", e.Jobs())
	}
	out := e.Outcomes()
	if len(out) != want {
		t.Errorf("%d outcomes, want %d", len(out), want)
	}
	if n := e.BlocksInUse(); n != 0 {
		t.Errorf("%d blocks are not free at the end", n)
	}
	if n := len(e.words); n != revokeWords {
		t.Errorf("%d revocation words of %d are free at the end", n, revokeWords)
	}
	if e.stats.WrongBytes != 0 {
		t.Errorf("%d wrong bytes", e.stats.WrongBytes)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.mu.leases) != 0 {
		t.Errorf("%d leases are left", len(f.mu.leases))
	}
	return out
}

// Everything at once: small cache, preemption, aborts, lost blocks, busy saves.
func TestStorm(t *testing.T) {
	seed := testSeed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	cfg := small(60)
	cfg.Seed = seed
	e, f := newTestEngine(t, cfg)
	f.lag, f.lose, f.busy, f.refuse = 2*time.Millisecond, 0.05, 0.1, 0.05
	requests := conversations(rng, 400, 16)
	for i := range requests {
		r := &requests[i]
		if rng.IntN(5) == 0 {
			r.Abort = Abort{When: When(1 + rng.IntN(4)), Output: rng.IntN(r.Output)}
		}
	}
	e.Add(requests...)
	out := finishAll(t, e, f, len(requests))
	aborted := 0
	for _, o := range out {
		if o.Aborted {
			aborted++
		}
		if o.Failed != "" {
			t.Errorf("request %d: %s", o.ID, o.Failed)
		}
	}
	s := e.Stats()
	t.Logf("%d aborted, %+v", aborted, s)
	for name, n := range map[string]uint64{
		"preemptions": s.Preemptions, "loads": s.BlocksLoaded, "saves": s.BlocksSaved, "aborts": uint64(aborted),
		"failed loads": s.LoadsFailed, "busy saves": s.SavesBusy,
	} {
		if n == 0 {
			t.Errorf("no %s in the whole run", name)
		}
	}
}

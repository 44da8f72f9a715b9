// Package mockengine plays an inference engine as a KV connector sees one: vLLM's scheduler, its
// prefix cache and its workers, in a process of its own, over the real protocols. There is no
// model: every KV block holds bytes derived from its whole prefix, position, layer and rank, so
// that each loaded byte can be checked.
//
// One goroutine (Engine) owns all scheduler state. Workers run steps on streams, as a GPU would.
// The link to the agent has goroutines of its own and passes finished jobs to the engine through
// one queue.
//
//	trace ──▶ Engine: waiting ─▶ loading ─▶ running ─▶ finished
//	             │ step n               ▲        │
//	             ▼                      │        ▼ save names step n
//	          workers (streams)       Agent seam (link: sessions, look-ups)
package mockengine

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"time"
)

// Limits of an engine.
const (
	MaxRanks  = 64
	MaxGroups = 16
	MaxBlocks = 1 << 24 // blocks of one engine
)

// What all engines have alike.
const (
	layers       = 4                    // segments of a block
	stepGap      = 1                    // steps in flight besides the one being scheduled, as with async scheduling
	stepTime     = 20.0                 // virtual time of a step, ms
	tokenTime    = 0.01                 // virtual time of each token in it, ms
	SpareTokens  = stepGap + 1          // of steps in flight, beyond the answer
	workerEvents = 64                   // events of a worker, used in turn
	revokeWords  = 1024                 // and so the maximum of saves in flight
	loadDeadline = 2 * time.Second      // a longer load is abandoned
	pendingWait  = 2 * time.Second      // how long a request waits for tiers that have not answered
	idleWait     = 5 * time.Millisecond // longest sleep of an engine that can do nothing
)

// Config configures an engine. Validate sets the defaults of zero fields.
type Config struct {
	Name  string // instance; an engine that starts again uses another one
	Model string // part of the identity: engines with equal identities share blocks
	Seed  uint64 // of the random generators

	Device string // where the workers' memory is: DeviceHost, DeviceCUDA or DeviceVirtual

	Ranks       int // tensor-parallel workers, each with its own shard
	Groups      int // KV cache groups; every second one has blocks of twice the tokens
	Blocks      int // KV cache blocks that can be given out, over all groups
	BlockTokens int // tokens one block hash stands for
	BlockBytes  int // bytes of one block on one rank, all layers

	StepTokens int // token budget of a step
	MaxRunning int // requests that run at once

	KernelLag     time.Duration // a kernel starts up to that much later, at random
	LookupTimeout time.Duration // longest wait for a look-up's answer, then it is a miss
}

// Validate sets defaults and returns an error that names what does not fit.
func (c *Config) Validate() error {
	c.Ranks, c.Groups, c.Blocks = cmp.Or(c.Ranks, 1), cmp.Or(c.Groups, 1), cmp.Or(c.Blocks, 2000)
	c.BlockTokens, c.BlockBytes = cmp.Or(c.BlockTokens, TraceBlock), cmp.Or(c.BlockBytes, 16<<10)
	c.StepTokens, c.MaxRunning = cmp.Or(c.StepTokens, 8192), cmp.Or(c.MaxRunning, 128)
	c.LookupTimeout = cmp.Or(c.LookupTimeout, 50*time.Millisecond)
	c.Device = cmp.Or(c.Device, DeviceHost)
	if c.BlockBytes%layers != 0 {
		return fmt.Errorf("block-bytes is %d, allowed are multiples of %d layers", c.BlockBytes, layers)
	}
	for g := range c.Groups {
		if _, err := newShape(c.blockTokens(g), c.BlockBytes/layers); err != nil {
			return fmt.Errorf("group %d: %w", g, err)
		}
	}
	return nil
}

// scale returns the block size of a group in multiples of BlockTokens: every second one is twice as
// large.
func scale(g int) int { return 1 + g%2 }

// blockTokens returns the number of tokens of a group's block.
func (c *Config) blockTokens(g int) int { return scale(g) * c.BlockTokens }

// align returns the number of tokens that is whole blocks in every group.
func (c *Config) align() int { return min(c.Groups, 2) * c.BlockTokens }

// BlocksFor returns the number of blocks that a request of that many tokens needs in all groups
// together.
func (c *Config) BlocksFor(tokens int) (n int) {
	for g := range c.Groups {
		n += ceilDiv(tokens, c.blockTokens(g))
	}
	return n
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }

// Engine is the scheduler: one goroutine calls its methods.
//
// Time is virtual: it orders arrivals and is the cost of steps. Look-ups, loads and their deadlines
// use wall time. An engine that can only wait for a load really waits.
type Engine struct {
	cfg     Config
	agent   Agent
	workers *Workers
	pool    *blockPool
	hasher  hasher
	rng     *rand.Rand
	scratch []uint64
	now     func() time.Time

	clock    float64 // virtual, ms
	step     uint64  // last step launched
	seq      uint64
	arrivals []Request  // to come, by time
	waiting  []*request // waiting and loaded, in order
	loading  []*request
	running  []*request
	inflight []*launched
	idle     []*work // to be reused
	jobs     jobs
	words    []uint32 // free revocation words

	outcomes []Outcome
	stats    Stats
	aborting int // live requests whose client will go away

	// OnWrong, if set, is called with each block with wrong bytes.
	OnWrong func(text string)
	// Stop, if set, ends Run early when it returns true.
	Stop func() bool
	// OnSubmit, if set, is called after each job submitted to the agent.
	OnSubmit func()
	// Trap, if set, is called when submitted jobs wait for a step whose kernels are halted half
	// way.
	Trap func()
}

// launched is a step in flight.
type launched struct {
	work    *work
	entries []entry
	tokens  int
}

// entry is one request's part in a step.
type entry struct {
	r       *request
	resets  int
	sampled bool // the step gives the request a token
	end     int  // tokens whose KV is written when the step has ended
}

// NewEngine returns an engine over an agent. The agent's memory is that of Workers: see NewLink.
func NewEngine(cfg Config, agent Agent, w *Workers) *Engine {
	e := &Engine{cfg: cfg, agent: agent, workers: w, pool: newBlockPool(cfg.Blocks), now: time.Now,
		rng: rand.New(rand.NewPCG(cfg.Seed, 2)), jobs: newJobs()}
	for i := revokeWords - 1; i >= 0; i-- {
		e.words = append(e.words, uint32(i))
	}
	return e
}

// Add adds requests, which must not arrive before those that were added already.
func (e *Engine) Add(requests ...Request) { e.arrivals = append(e.arrivals, requests...) }

// Run runs until the virtual time, or for ever with until < 0, while there is work and Stop does
// not return true. Time skips idle periods.
func (e *Engine) Run(until float64) {
	for {
		e.arrive()
		e.poll()
		e.expire()
		e.abort()
		switch {
		case len(e.waiting)+len(e.loading)+len(e.running)+len(e.inflight) == 0:
			if len(e.arrivals) == 0 || until >= 0 && e.arrivals[0].At >= until {
				e.clock = max(e.clock, until)
				return
			}
			e.clock = max(e.clock, e.arrivals[0].At)
		case until >= 0 && e.clock >= until, e.Stop != nil && e.Stop():
			return
		default:
			e.turn()
		}
	}
}

// turn runs one step, or waits where none can be made.
func (e *Engine) turn() {
	s := e.schedule()
	if s != nil {
		e.inflight = append(e.inflight, s)
		e.clock += stepTime + float64(s.tokens)*tokenTime
	}
	if len(e.inflight) > stepGap || s == nil && len(e.inflight) > 0 {
		e.update(e.inflight[0])
		e.inflight = e.inflight[1:]
	} else if s == nil {
		e.await(idleWait)
	}
}

// await handles one event, or returns when none arrives in time.
func (e *Engine) await(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case ev := <-e.agent.Events():
		e.over(ev)
	case <-t.C:
	}
}

// poll handles the events that have arrived.
func (e *Engine) poll() {
	for {
		select {
		case ev := <-e.agent.Events():
			e.over(ev)
		default:
			return
		}
	}
}

func (e *Engine) arrive() {
	for len(e.arrivals) > 0 && e.arrivals[0].At <= e.clock {
		e.seq++
		r := newRequest(e.arrivals[0], &e.cfg, e.seq)
		e.arrivals = e.arrivals[1:]
		if n := e.cfg.BlocksFor(len(r.truth)); n > e.cfg.Blocks {
			e.outcomes = append(e.outcomes, Outcome{ID: r.ID,
				Failed: fmt.Sprintf("needs %d blocks, the engine has %d", n, e.cfg.Blocks)})
			continue
		}
		if r.Abort.When != Never {
			e.aborting++
		}
		e.waiting = insert(e.waiting, r)
	}
}

// Settle waits until no save is in flight, at most d.
func (e *Engine) Settle(d time.Duration) {
	e.awaitUntil(d, func() bool { return len(e.jobs.saves) == 0 })
}

// Drain waits until no job is in flight, at most d, and reports whether that is so.
func (e *Engine) Drain(d time.Duration) bool {
	return e.awaitUntil(d, func() bool { return len(e.jobs.byID) == 0 })
}

func (e *Engine) awaitUntil(d time.Duration, over func() bool) bool {
	end := e.now().Add(d)
	e.poll()
	for !over() && e.now().Before(end) {
		e.await(min(idleWait, time.Until(end)))
	}
	return over()
}

// Outcomes returns the requests that ended since the last call.
func (e *Engine) Outcomes() []Outcome {
	o := e.outcomes
	e.outcomes = nil
	return o
}

// Stats returns the counters so far.
func (e *Engine) Stats() Stats { return e.stats }

// Jobs returns the number of jobs that the agent has and has not reported.
func (e *Engine) Jobs() int { return len(e.jobs.byID) }

// Live returns the number of requests that have not ended.
func (e *Engine) Live() int {
	return len(e.arrivals) + len(e.waiting) + len(e.loading) + len(e.running)
}

// BlocksInUse returns the number of blocks that are not free: 0 when no request is live and no job
// in flight.
func (e *Engine) BlocksInUse() int { return e.cfg.Blocks - e.pool.free }

func (e *Engine) onWrong(r *request, g, b, n int) {
	if e.OnWrong != nil {
		e.OnWrong(fmt.Sprintf("request %d, state %d: %d wrong bytes in block %d of group %d (engine block %d)", r.ID,
			r.state, n, b, g, r.tables[g][b]))
	}
}

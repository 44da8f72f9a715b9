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
	"fmt"
	"math/rand/v2"
	"time"
)

// Engine is the scheduler: one goroutine calls its methods.
//
// Time is virtual: it orders arrivals and is the cost of steps. Look-ups, loads and their deadlines
// use wall time. An engine that can only wait for a load really waits.
type Engine struct {
	cfg     Config
	agent   Agent
	workers *workers
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
	r        *request
	resets   int
	drafts   int
	accepted int
	sampled  bool
	pos      int // worker: tokens written when the step has ended
}

// NewEngine returns an engine over an agent. The agent's memory is that of Workers: see NewLink.
func NewEngine(cfg Config, agent Agent, w *Workers) *Engine {
	e := &Engine{cfg: cfg, agent: agent, workers: w.w, pool: newBlockPool(cfg.Blocks), now: time.Now,
		rng: rand.New(rand.NewPCG(cfg.Seed, 2)), jobs: newJobs()}
	for i := cfg.Revokes - 1; i >= 0; i-- {
		e.words = append(e.words, uint32(i))
	}
	return e
}

// Workers are the ranks of an engine: memory and streams.
type Workers struct{ w *workers }

// NewWorkers returns the ranks of a validated configuration. Close frees them, when no agent can
// reach them any more.
func NewWorkers(cfg *Config) (*Workers, error) {
	w, err := newWorkers(cfg)
	if err != nil {
		return nil, err
	}
	return &Workers{w}, nil
}

// Close waits for the streams and frees the memory.
func (w *Workers) Close() { w.w.close() }

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
	depth := 0
	if e.cfg.Async {
		depth = maxStepGap
	}
	s := e.schedule()
	if s != nil {
		e.inflight = append(e.inflight, s)
		e.clock += ms(e.cfg.StepTime) + float64(s.tokens)*ms(e.cfg.TokenTime)
	}
	if len(e.inflight) > depth || s == nil && len(e.inflight) > 0 {
		e.update(e.inflight[0])
		e.inflight = e.inflight[1:]
	} else if s == nil {
		e.await(idleWait)
	}
}

// idleWait is the longest sleep of an engine that can do nothing: deadlines and arrivals are
// checked that often.
const idleWait = 5 * time.Millisecond

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
		r := newRequest(e.arrivals[0], &e.cfg, e.seq, 2*(e.cfg.Drafts+1)+1)
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
	end := e.now().Add(d)
	e.poll()
	for e.jobs.saves > 0 && e.now().Before(end) {
		e.await(min(idleWait, time.Until(end)))
	}
}

// Drain waits until no job is in flight, at most d, and reports whether that is so.
func (e *Engine) Drain(d time.Duration) bool {
	end := e.now().Add(d)
	e.poll()
	for len(e.jobs.byID) > 0 && e.now().Before(end) {
		e.await(idleWait)
	}
	return len(e.jobs.byID) == 0
}

// Outcomes returns the requests that ended since the last call.
func (e *Engine) Outcomes() []Outcome {
	o := e.outcomes
	e.outcomes = nil
	return o
}

// Stats returns the counters so far.
func (e *Engine) Stats() Stats { return e.stats }

// Clock returns the virtual time in ms.
func (e *Engine) Clock() float64 { return e.clock }

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

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

package mockengine

import (
	"cmp"
	"slices"
	"time"
)

// Request is one prompt and the length of its answer.
type Request struct {
	ID       uint64   `json:"id"`
	At       float64  `json:"at"`                  // virtual time of arrival, ms
	Prompt   []uint64 `json:"prompt"`              // hash ids, one per BlockTokens tokens
	Output   int      `json:"output"`              // tokens of the answer, at least 1
	SkipSave bool     `json:"skip_save,omitempty"` // nothing of it is saved
	Abort    Abort    `json:"abort,omitzero"`
}

// Abort defines when a client disconnects. If that moment never comes, it is after Output tokens.
type Abort struct {
	When   When `json:"when,omitempty"`
	Output int  `json:"output,omitempty"` // running: tokens of the answer seen
}

// When a client disconnects.
type When uint8

// The moments.
const (
	Never   When = iota
	Waiting      // before it ran
	Loading      // while blocks are being loaded
	Saving       // while blocks are being saved
	Running      // after Output tokens of the answer
)

// Outcome is a request that has ended.
type Outcome struct {
	ID      uint64 `json:"id"`
	Own     int    `json:"own,omitempty"`  // prompt hash blocks found in the engine's own cache
	Pool    int    `json:"pool,omitempty"` // prompt hash blocks loaded from the agent after them
	Output  int    `json:"output,omitempty"`
	Aborted bool   `json:"aborted,omitempty"`
	Failed  string `json:"failed,omitempty"`
}

type state uint8

const (
	stateWaiting state = iota // no blocks
	stateLoading              // destination blocks, a load in flight
	stateLoaded               // blocks, nct > 0, in the waiting queue
	stateRunning
	stateOver
)

// request is the scheduler's state of a request. vLLM's names: nt is num_tokens, nct
// num_computed_tokens, ph num_output_placeholders. truth is the worker's: what a GPU knows before
// the scheduler does.
type request struct {
	Request
	seq    uint64 // order of arrival
	state  state
	prompt int // tokens
	nt     int // tokens that are known: prompt and accepted output
	nct    int // tokens whose KV is computed or scheduled
	ph     int // tokens that are scheduled to come out and are not known
	resets int // how often the blocks were taken away: results of steps before that are stale
	need   int // free blocks it waited for in vain; 0: not known

	truth     []uint32 // all tokens that the request will ever have
	confirmed int      // tokens whose KV steps that have ended wrote
	hashes    []Hash   // of whole blocks, made when they are asked for
	tails     []tail   // per group

	tables   [][]BlockID // per group
	cursor   []int       // per group: blocks given to saves
	saveFrom uint64      // step before which no save is tried again
	fetched  [2]int      // tokens that came from the pool: no need to save them
	saving   int         // save jobs under way

	asked   *asked
	pending time.Time // since when lower tiers are being asked; zero: they are not
	noLoad  bool      // a load failed: the request computes
	load    *job

	counted   bool
	own, pool int
}

// asked is a look-up's answer, kept until the request is admitted.
type asked struct {
	own, tokens int
	lease       Lease
}

// tail is the position of the last step in a group's last block.
type tail struct {
	pos   int
	state chain
}

// newRequest makes the tokens, with those that steps in flight may write beyond the answer.
func newRequest(spec Request, cfg *Config, seq uint64) *request {
	spec.Output = max(spec.Output, 1)
	prompt := len(spec.Prompt) * cfg.BlockTokens
	r := &request{Request: spec, seq: seq, prompt: prompt, nt: prompt}
	r.tables = make([][]BlockID, cfg.Groups)
	r.cursor = make([]int, cfg.Groups)
	r.tails = make([]tail, cfg.Groups)
	r.truth = make([]uint32, prompt+spec.Output+SpareTokens)
	for i, id := range spec.Prompt {
		promptTokens(r.truth[i*cfg.BlockTokens:(i+1)*cfg.BlockTokens], id)
	}
	outputTokens(r.truth[prompt:], spec.ID)
	return r
}

// settled returns how many leading tokens of a request are known and have their KV once everything
// scheduled has run. Only these are published in the prefix cache and saved.
func (r *request) settled() int { return min(r.nct, r.nt) }

// insert puts r into a queue in the order of arrival.
func insert(q []*request, r *request) []*request {
	i, _ := slices.BinarySearchFunc(q, r, func(a, b *request) int { return cmp.Compare(a.seq, b.seq) })
	return slices.Insert(q, i, r)
}

func remove(q []*request, r *request) []*request {
	return slices.DeleteFunc(q, func(o *request) bool { return o == r })
}

// hash returns the hash of hash block i.
func (e *Engine) hash(r *request, i int) *Hash {
	n := e.cfg.BlockTokens
	for len(r.hashes) <= i {
		k := len(r.hashes)
		h := e.hasher.next(e.parent(r, k), r.truth[k*n:(k+1)*n])
		r.hashes = append(r.hashes, h)
	}
	return &r.hashes[i]
}

var noHash Hash

// parent returns the hash of the block before hash block i.
func (e *Engine) parent(r *request, i int) *Hash {
	if i == 0 {
		return &noHash
	}
	return e.hash(r, i-1)
}

// key returns the key of block b of a group: the hash at its end.
func (e *Engine) key(r *request, g, b int) cacheKey {
	return cacheKey{group: uint8(g), hash: *e.hash(r, (b+1)*scale(g)-1)}
}

// prompt returns the hashes of all known whole blocks.
func (e *Engine) prompt(r *request) []Hash {
	if n := r.nt / e.cfg.BlockTokens; n > 0 {
		e.hash(r, n-1)
		return r.hashes[:n]
	}
	return nil
}

// write adds to a step the words that tokens at positions from on complete, in all groups.
func (e *Engine) write(k *work, r *request, from int, tokens []uint32) {
	for g := range e.cfg.Groups {
		size, shape := e.cfg.blockTokens(g), &e.workers.shapes[g]
		for i := from; i < from+len(tokens); {
			b, off := i/size, i%size
			end := min((b+1)*size, from+len(tokens))
			state := e.chainAt(r, g, i)
			at := len(k.bases)
			k.bases, state = shape.appendBase(k.bases, state, off, tokens[i-from:end-from])
			if at < len(k.bases) {
				k.pieces = append(k.pieces, piece{group: uint8(g), block: r.tables[g][b], at: shape.complete(off),
					from: at, to: len(k.bases)})
			}
			r.tails[g] = tail{pos: end, state: state}
			i = end
		}
	}
}

// chainAt returns the state before position i in the block of a group that holds it.
func (e *Engine) chainAt(r *request, g, i int) chain {
	size := e.cfg.blockTokens(g)
	b := i / size
	if i%size != 0 && r.tails[g].pos == i {
		return r.tails[g].state
	}
	c := startChain(e.parent(r, b*scale(g)))
	for _, t := range r.truth[b*size : i] {
		c = c.next(t)
	}
	return c
}

// check compares the blocks that hold tokens from to to-1 of a request with the expected content.
// Blocks must be whole at from; words that a token before to does not complete are not compared.
func (e *Engine) check(r *request, g, from, to int) {
	size, shape := e.cfg.blockTokens(g), &e.workers.shapes[g]
	for b := from / size; b*size < to; b++ {
		end := min((b+1)*size, to)
		e.scratch, _ = shape.appendBase(e.scratch[:0], startChain(e.parent(r, b*scale(g))), 0,
			r.truth[b*size:end])
		e.stats.BlocksVerified++
		if n := e.workers.wrong(uint8(g), r.tables[g][b], e.scratch); n > 0 {
			e.stats.WrongBytes += uint64(n)
			e.onWrong(r, g, b, n)
		}
	}
}

// admit takes waiting requests in order until budget, seats or blocks run out. Each looks in the
// engine's own cache, then asks the agent, and either starts to compute or waits for a load. It
// returns the requests that start to load.
func (e *Engine) admit(s *launched, budget int) (loads []*request) {
	for len(e.waiting) > 0 && budget > 0 && len(e.running) < e.cfg.MaxRunning {
		r := e.next()
		if r.need > e.pool.free && len(e.running) > 0 {
			return loads
		}
		load, ok := e.place(r)
		if !ok {
			return loads
		}
		if load {
			e.waiting = remove(e.waiting, r)
			r.state = stateLoading
			e.loading = append(e.loading, r)
			loads = append(loads, r)
			continue
		}
		n := min(r.nt-r.nct, budget)
		if !e.allocate(r, r.nct+n) {
			e.unstall(r)
			return loads
		}
		e.waiting = remove(e.waiting, r)
		r.state, r.need = stateRunning, 0
		e.count(r)
		e.running = insert(e.running, r)
		e.enter(s, r, n)
		budget -= n
	}
	return loads
}

// place gives a request the blocks that exist already: its own cached ones, or a load's
// destination. load reports that it has to wait for the agent; ok is false if there is no room, and
// then it has no blocks. A loaded request has its blocks.
func (e *Engine) place(r *request) (load, ok bool) {
	if r.state == stateLoaded {
		return false, true
	}
	own := e.match(r)
	tokens, pending := e.ask(r, own)
	if pending {
		return false, false // it is considered again in a later step
	}
	total := max(own, tokens)
	e.adopt(r, own)
	missing := e.cfg.BlocksFor(r.nt) - held(r)
	if total > own {
		// A load cannot be preempted: it is admitted only if the whole prompt fits with what other
		// loads will need.
		if missing+e.reserved() <= e.pool.free {
			e.allocate(r, total)
			r.nct, r.fetched = total, [2]int{own, total}
			return true, true
		}
		if len(e.running)+len(e.loading) > 0 {
			r.need = min(missing+e.reserved(), e.cfg.Blocks)
			e.drop(r)
			return false, false
		}
	}
	first := min(e.cfg.BlocksFor(own+min(r.nt-own, e.cfg.StepTokens))-held(r), missing)
	if first > e.pool.free && !e.relieve(first) {
		r.need = first
		e.drop(r)
		return false, false
	}
	e.forgetAnswer(r)
	r.nct = own
	return false, true
}

// match returns the longest prefix in the engine's own cache, whole in every group, that leaves a
// token to compute.
func (e *Engine) match(r *request) int {
	align := e.cfg.align()
	n := (r.nt - 1) / align * align
	for g := range e.cfg.Groups {
		size, b := e.cfg.blockTokens(g), 0
		for (b+1)*size <= n {
			if _, ok := e.pool.find(e.key(r, g, b)); !ok {
				break
			}
			b++
		}
		n = min(n, b*size) / align * align
	}
	return n
}

// adopt takes the own cached blocks of the first n tokens.
func (e *Engine) adopt(r *request, n int) {
	for g := range e.cfg.Groups {
		for b := range n / e.cfg.blockTokens(g) {
			id, _ := e.pool.find(e.key(r, g, b))
			e.pool.ref(id)
			r.tables[g] = append(r.tables[g], id)
		}
	}
}

// ask returns how many tokens the agent has, from the first on. It asks once while a request cannot
// be admitted, because a waiting request is considered in every step, and again if the engine's own
// part has shrunk since, because the lease begins after it. pending reports that lower tiers are
// still being asked: the request waits, but no longer than pendingWait, because an agent might say
// so for ever.
func (e *Engine) ask(r *request, own int) (tokens int, pending bool) {
	if r.noLoad {
		return 0, false
	}
	if r.asked != nil && own >= r.asked.own {
		return r.asked.tokens, false
	}
	e.forgetAnswer(r)
	hashes := e.prompt(r)
	if n := (r.nt - 1) / e.cfg.align() * e.cfg.align(); n <= own || len(hashes) == 0 {
		return 0, false // nothing left that could be loaded
	}
	start := e.now()
	a := e.agent.Ask(&Question{Hashes: hashes, Tokens: r.nt, Own: own})
	if a.Failed {
		e.stats.LookupMisses++
	}
	if a.Pending {
		if r.pending.IsZero() {
			r.pending = start
		}
		if start.Sub(r.pending) < pendingWait {
			e.release(a.Lease)
			return 0, true
		}
	}
	r.pending = time.Time{}
	r.asked = &asked{own: own, tokens: e.usable(r, a.Tokens), lease: a.Lease}
	return r.asked.tokens, false
}

// usable cuts an answer to whole blocks of every group, before the last token. It is the engine's
// own rule, whatever the agent says.
func (e *Engine) usable(r *request, tokens int) int {
	return min(tokens, r.nt-1) / e.cfg.align() * e.cfg.align()
}

// forgetAnswer drops a look-up's answer and releases its lease.
func (e *Engine) forgetAnswer(r *request) {
	if r.asked != nil {
		e.release(r.asked.lease)
	}
	r.asked = nil
}

// count records once, at the first admission, where a request's prompt came from.
func (e *Engine) count(r *request) {
	if r.counted {
		return
	}
	r.counted = true
	n := e.cfg.BlockTokens
	r.pool = (r.fetched[1] - r.fetched[0]) / n
	r.own = r.nct/n - r.pool
}

// reserved returns the blocks that requests with loads will still need to compute their prompts.
func (e *Engine) reserved() (n int) {
	for _, q := range [][]*request{e.loading, e.waiting} {
		for _, r := range q {
			if r.state == stateLoading || r.state == stateLoaded {
				n += e.cfg.BlocksFor(r.nt) - held(r)
			}
		}
	}
	return n
}

func held(r *request) (n int) {
	for _, t := range r.tables {
		n += len(t)
	}
	return n
}

// next returns the request that is admitted next: those with loaded blocks first, as in vLLM,
// because they keep them.
func (e *Engine) next() *request {
	for _, r := range e.waiting {
		if r.state == stateLoaded {
			return r
		}
	}
	return e.waiting[0]
}

// unstall makes room for a loaded request that finds none though nothing runs: the last loaded one
// starts over.
func (e *Engine) unstall(r *request) {
	if r.state != stateLoaded {
		panic("a request that fitted found no room")
	}
	if len(e.running)+len(e.loading)+len(e.inflight) > 0 {
		return
	}
	for i := len(e.waiting) - 1; i >= 0; i-- {
		if o := e.waiting[i]; o.state == stateLoaded {
			e.reset(o)
			return
		}
	}
}

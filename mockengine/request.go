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

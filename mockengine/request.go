package mockengine

import "time"

// Request is one prompt and the length of its answer.
type Request struct {
	ID       uint64   `json:"id"`
	At       float64  `json:"at"`     // virtual time of arrival, ms
	Prompt   []uint64 `json:"prompt"` // hash ids, one per BlockTokens tokens
	Tokens   int      `json:"tokens,omitempty"`
	Output   int      `json:"output"` // tokens of the answer, at least 1
	Priority int      `json:"priority,omitempty"`
	SkipSave bool     `json:"skip_save,omitempty"`
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
	ID        uint64 `json:"id"`
	Own       int    `json:"own,omitempty"`  // prompt hash blocks found in the engine's own cache
	Pool      int    `json:"pool,omitempty"` // prompt hash blocks loaded from the agent after them
	Output    int    `json:"output,omitempty"`
	Aborted   bool   `json:"aborted,omitempty"`
	Preempted int    `json:"preempted,omitempty"`
	Failed    string `json:"failed,omitempty"`
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
// num_computed_tokens, ph num_output_placeholders. truth and pos are the worker's: what a GPU knows
// before the scheduler does.
type request struct {
	Request
	seq    uint64 // order of arrival
	state  state
	prompt int // tokens
	nt     int // tokens that are known: prompt and accepted output
	nct    int // tokens whose KV is computed or scheduled
	ph     int // tokens that are scheduled to come out and are not known
	specOn bool
	resets int // how often the blocks were taken away: results of steps before that are stale
	need   int // free blocks it waited for in vain; 0: not known

	truth      []uint32 // all tokens that the request will ever have
	pos        int      // worker: tokens whose KV is written, or will be by the steps launched
	confirmed  int      // tokens whose KV steps that have ended wrote
	trueHashes []Hash
	tails      []tail // per group

	tables   [][]BlockID // per group
	cursor   []int       // per group: blocks given to saves
	saveFrom uint64      // step before which no save is tried again
	fetched  [2]int      // tokens that came from the pool: no need to save them
	saving   int         // save jobs under way

	asked   *asked
	pending time.Time         // since when lower tiers are being asked; zero: they are not
	failed  map[Hash]struct{} // keys whose load failed: not asked for again
	noLoad  bool              // a whole load was lost: the request computes
	load    *job

	counted   bool
	own, pool int
	preempted int
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

// newRequest makes the tokens; spare is how many a worker may write beyond the answer.
func newRequest(spec Request, cfg *Config, seq uint64, spare int) *request {
	spec.Output = max(spec.Output, 1)
	if spec.Tokens <= 0 || spec.Tokens > len(spec.Prompt)*cfg.BlockTokens {
		spec.Tokens = len(spec.Prompt) * cfg.BlockTokens
	}
	r := &request{Request: spec, seq: seq, prompt: spec.Tokens, nt: spec.Tokens}
	r.tables = make([][]BlockID, len(cfg.Groups))
	r.cursor = make([]int, len(cfg.Groups))
	r.tails = make([]tail, len(cfg.Groups))
	r.truth = make([]uint32, len(spec.Prompt)*cfg.BlockTokens, r.prompt+spec.Output+spare+cfg.BlockTokens)
	for i, id := range spec.Prompt {
		promptTokens(r.truth[i*cfg.BlockTokens:(i+1)*cfg.BlockTokens], id)
	}
	r.truth = r.truth[:r.prompt+spec.Output+spare]
	outputTokens(r.truth[r.prompt:], spec.ID, 0)
	return r
}

// last returns the number of tokens at which the request is complete.
func (r *request) last() int { return r.prompt + r.Output }

// settled returns how many leading tokens of a request have their final KV once everything
// scheduled has run: no placeholder, whose token is unknown, and no draft, which may be rejected.
// Only these are published in the prefix cache and saved.
func settled(nct, placeholders, known int) int { return min(nct-placeholders, known) }

func (r *request) settled() int { return settled(r.nct, r.ph, r.nt) }

// before reports the order of the queues: priority first, then arrival.
func (r *request) before(o *request) bool {
	if r.Priority != o.Priority {
		return r.Priority < o.Priority
	}
	return r.seq < o.seq
}

// insert puts r into a queue in its order.
func insert(q []*request, r *request) []*request {
	i := len(q)
	for i > 0 && r.before(q[i-1]) {
		i--
	}
	q = append(q, nil)
	copy(q[i+1:], q[i:])
	q[i] = r
	return q
}

func remove(q []*request, r *request) []*request {
	for i := range q {
		if q[i] == r {
			return append(q[:i], q[i+1:]...)
		}
	}
	return q
}

package mockengine

import (
	"container/list"
	"fmt"
	"math/rand/v2"

	"github.com/kvagent/kvagent/trace"
)

// Stats has an engine's counters since its start. Blocks are counted once for all ranks, bytes on
// every rank.
type Stats struct {
	BlocksSaved    uint64 `json:"blocks_saved"`
	BytesSaved     uint64 `json:"bytes_saved"`
	BlocksLoaded   uint64 `json:"blocks_loaded"`
	BytesLoaded    uint64 `json:"bytes_loaded"`
	BlocksVerified uint64 `json:"blocks_verified"`
	WrongBytes     uint64 `json:"wrong_bytes"`

	LookupMisses uint64 `json:"lookup_misses"` // look-ups that were not answered: no agent, or too late
	SavesBusy    uint64 `json:"saves_busy"`    // save jobs postponed: queue full, or no revocation word
	SavesRevoked uint64 `json:"saves_revoked"` // save jobs revoked by their word
	LoadsFailed  uint64 `json:"loads_failed"`  // load jobs that did not deliver everything
	LoadsLate    uint64 `json:"loads_late"`    // load jobs abandoned at the deadline
	Preemptions  uint64 `json:"preemptions"`
}

// Add adds another engine's counters.
func (s *Stats) Add(o *Stats) {
	for _, f := range []struct{ to, from *uint64 }{
		{&s.BlocksSaved, &o.BlocksSaved}, {&s.BytesSaved, &o.BytesSaved}, {&s.BlocksLoaded, &o.BlocksLoaded},
		{&s.BytesLoaded, &o.BytesLoaded}, {&s.BlocksVerified, &o.BlocksVerified}, {&s.WrongBytes, &o.WrongBytes},
		{&s.LookupMisses, &o.LookupMisses}, {&s.SavesBusy, &o.SavesBusy}, {&s.SavesRevoked, &o.SavesRevoked},
		{&s.LoadsFailed, &o.LoadsFailed}, {&s.LoadsLate, &o.LoadsLate}, {&s.Preemptions, &o.Preemptions},
	} {
		*f.to += *f.from
	}
}

// Limits of what is replayed. Beyond one, the trace is refused with its line.
const (
	MaxTraceBlocks = 8192    // blocks of one prompt
	MaxTraceOutput = 1 << 20 // tokens of one answer
	TraceBlock     = 512     // tokens one hash id of a trace stands for
)

// Record is one request of a trace. HashIDs has one number for each TraceBlock tokens of the
// prompt, at least one, equal when the block and all before it are equal.
type Record struct {
	Timestamp    float64 // ms
	OutputLength int     // tokens
	HashIDs      []uint64
}

// ReadTrace reads the first limit requests of a trace, all with limit 0, in the order of their
// time. It skips requests without blocks.
func ReadTrace(path string, limit int) ([]Record, error) {
	requests, err := trace.Read(path, limit)
	if err != nil {
		return nil, err
	}
	var records []Record
	for i := range requests {
		if len(requests[i].HashIDs) == 0 {
			continue
		}
		rec, err := recordOf(&requests[i])
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, requests[i].Line, err)
		}
		records = append(records, rec)
	}
	return records, nil
}

// recordOf returns a request with blocks. Without a length it has whole blocks, and no answer.
func recordOf(r *trace.Request) (rec Record, err error) {
	n := len(r.HashIDs)
	if n > MaxTraceBlocks {
		return rec, fmt.Errorf("hash_ids has %d numbers, must have at most %d", n, MaxTraceBlocks)
	}
	rec = Record{Timestamp: r.Timestamp, HashIDs: r.HashIDs}
	if _, err = r.InputLength.Within(1, n*TraceBlock, n*TraceBlock); err != nil {
		return rec, fmt.Errorf("%w with %d hash_ids", err, n)
	}
	rec.OutputLength, err = r.OutputLength.Within(0, MaxTraceOutput, 0)
	return rec, err
}

// DrawRequests draws n requests: conversations whose turns repeat what was said and continue it.
func DrawRequests(seed uint64, n int) []Request {
	rng := rand.New(rand.NewPCG(seed, 5))
	var past [][]uint64
	requests := make([]Request, n)
	next := uint64(1)
	for i := range requests {
		var ids []uint64
		if len(past) > 0 && rng.IntN(3) > 0 {
			ids = append(ids, past[rng.IntN(len(past))]...)
		}
		for k := 1 + rng.IntN(8); k > 0 && len(ids) < 64; k-- {
			ids = append(ids, next)
			next++
		}
		past = append(past, ids)
		requests[i] = Request{ID: uint64(i + 1), At: float64(i) * 300, Prompt: ids, Output: 1 + rng.IntN(600)}
	}
	return requests
}

// Simulate returns the share of all prompt blocks that a perfect system of these caches would hit:
// one LRU of engineBlocks for each engine and one LRU pool of poolBlocks (0: no limit) for all of
// them. Request i goes to engine deal(i). It is the oracle of a replay and shares nothing with the
// engine: no time, no tokens, no blocks, only hash ids. A request's blocks count as cached, in its
// engine and in the pool, when it arrives. A hit is a block that continues the prefix from the
// engine's own cache and then, where that ends, from the pool. So a repeated prompt hits whole
// here, while an engine computes its last token, and with that its last block, again.
func Simulate(records []Record, engines, engineBlocks, poolBlocks int, deal func(int) int) float64 {
	own := make([]*simLRU, engines)
	for i := range own {
		own[i] = newSimLRU(engineBlocks)
	}
	pool := newSimLRU(poolBlocks)
	hits, total := 0, 0
	for i, rec := range records {
		cache := own[deal(i)]
		n := 0
		for n < len(rec.HashIDs) && cache.has(rec.HashIDs[n]) {
			n++
		}
		for n < len(rec.HashIDs) && pool.has(rec.HashIDs[n]) {
			n++
		}
		hits += n
		total += len(rec.HashIDs)
		cache.use(rec.HashIDs)
		pool.use(rec.HashIDs)
	}
	if total == 0 {
		return 0
	}
	return float64(hits) / float64(total)
}

// simLRU is an exact LRU over hash ids.
type simLRU struct {
	capacity int // 0: no limit
	order    *list.List
	at       map[uint64]*list.Element
}

func newSimLRU(capacity int) *simLRU {
	return &simLRU{capacity: capacity, order: list.New(), at: make(map[uint64]*list.Element)}
}

func (l *simLRU) has(id uint64) bool { return l.at[id] != nil }

// use makes a chain the most recent, its first block before its last: a suffix is evicted before
// its prefix.
func (l *simLRU) use(chain []uint64) {
	for i := len(chain) - 1; i >= 0; i-- {
		if e := l.at[chain[i]]; e != nil {
			l.order.MoveToFront(e)
			continue
		}
		l.at[chain[i]] = l.order.PushFront(chain[i])
	}
	for l.capacity > 0 && l.order.Len() > l.capacity {
		e := l.order.Back()
		delete(l.at, e.Value.(uint64))
		l.order.Remove(e)
	}
}

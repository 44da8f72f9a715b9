package replay

import (
	"fmt"
	"math/rand/v2"

	"github.com/kvagent/kvagent/mockengine"
)

// dealTurns returns the engine of each request. A request that repeats more than a shared first
// block of an earlier one is a later turn of its conversation, and goes to the next engine after
// that of the earlier turn, so it can find only what another engine saved. Other requests rotate.
func dealTurns(records []mockengine.Record, engines int) []int {
	last := make(map[uint64]int) // engine that had a block last
	deal := make([]int, len(records))
	next := 0
	for i, rec := range records {
		to := -1
		for k := len(rec.HashIDs) - 1; k >= 1; k-- {
			if e, ok := last[rec.HashIDs[k]]; ok {
				to = (e + 1) % engines
				break
			}
		}
		if to < 0 {
			to = next
			next = (next + 1) % engines
		}
		deal[i] = to
		for _, id := range rec.HashIDs {
			last[id] = to
		}
	}
	return deal
}

// requestFor returns the request of a record. Prompts are padded to whole blocks, so that a prompt
// is len(hash_ids) blocks and figures can be compared with those published for the trace.
func (s *scenario) requestFor(rng *rand.Rand, id uint64, rec *mockengine.Record) mockengine.Request {
	q := mockengine.Request{ID: id, At: rec.Timestamp, Prompt: rec.HashIDs, Output: rec.OutputLength}
	if rng.Float64() < float64(s.abortRate) {
		q.Abort = mockengine.Abort{When: mockengine.When(1 + rng.IntN(4)), Output: rng.IntN(rec.OutputLength + 1)}
	}
	return q
}

// engineConfig returns the configuration that all engines share.
func (s *scenario) engineConfig(records []mockengine.Record) (mockengine.Config, error) {
	c := mockengine.Config{
		Name: "engine", Model: "mock/replay", Seed: s.seed, Ranks: s.ranks, Groups: s.groups,
		Blocks: max(s.engineBlocks, 1), BlockBytes: int(s.blockBytes),
		KernelLag: s.kernelLag, LookupTimeout: s.lookupTimeout,
	}
	if err := c.Validate(); err != nil {
		return c, err
	}
	most := 0
	for i := range records {
		tokens := len(records[i].HashIDs)*mockengine.TraceBlock + records[i].OutputLength + mockengine.SpareTokens
		most = max(most, c.BlocksFor(tokens))
	}
	if s.engineBlocks == 0 {
		c.Blocks = max(2000, most)
		if s.engines >= 8 {
			c.Blocks = max(512, most)
		}
	}
	if c.Blocks < most {
		return c, fmt.Errorf("engine-blocks: %d, allowed: %d and more, which the largest request needs", c.Blocks, most)
	}
	return c, nil
}

// Sizes of a pool that holds everything: a margin for slabs that are not full, and room for
// answers.
const (
	poolMargin = 1.25
	poolLeast  = 128 << 20 // bytes
)

// poolSize returns the configured size of the pool, or one that holds all blocks of the trace and
// of the answers.
func (s *scenario) poolSize(c *mockengine.Config, records []mockengine.Record) int64 {
	if s.pool > 0 {
		return s.pool
	}
	unique := make(map[uint64]struct{})
	answers := 0
	for i := range records {
		for _, id := range records[i].HashIDs {
			unique[id] = struct{}{}
		}
		answers += records[i].OutputLength/mockengine.TraceBlock + 1
	}
	blocks := float64(c.BlocksFor((len(unique) + answers) * mockengine.TraceBlock))
	return int64(blocks*float64(s.blockBytes)*float64(s.ranks)*poolMargin) + poolLeast
}

// poolBlocks returns the capacity of the pool in hash blocks, for the simulation; 0 is no limit.
// capacity is that of an agent that runs already.
func (s *scenario) poolBlocks(c *mockengine.Config, capacity int64) int {
	if capacity == 0 {
		capacity = s.pool
	}
	perHash := float64(c.BlocksFor(64*mockengine.TraceBlock)) / 64
	return int(float64(capacity) / (perHash * float64(s.blockBytes) * float64(s.ranks)))
}

package admin

import "github.com/kvagent/kvagent/transfer"

// SampleCounters count the blocks of one direction that were chosen for an end-to-end check.
type SampleCounters struct{ matched, mismatched, unverified *Counter }

// Add counts the blocks of one job.
func (c *SampleCounters) Add(n *transfer.SampleCounts) {
	c.matched.Add(n.Matched)
	c.mismatched.Add(n.Mismatched)
	c.unverified.Add(n.Unverified)
}

func (m *Metrics) makeSamples() {
	const help = "Blocks chosen for an end-to-end check, by direction and result: matched, mismatched " +
		"(the engine has other bytes than the pool, should be 0), unverified (not summed in time, or the engine died or gave the block up)."
	for kind, op := range [...]string{transfer.Save: "save", transfer.Load: "load"} {
		c := &m.Samples[kind]
		c.matched = m.counter("kvagent_sampled_blocks_total", help, "op", op, "result", "matched")
		c.mismatched = m.counter("kvagent_sampled_blocks_total", help, "op", op, "result", "mismatched")
		c.unverified = m.counter("kvagent_sampled_blocks_total", help, "op", op, "result", "unverified")
	}
}

// SampleStatus is the end-to-end check of a sample of the blocks that are copied.
type SampleStatus struct {
	Every uint32 `json:"every"` // one block in so many; 0: none
	// Blocks since the start.
	Saves        SampleCounts `json:"saves"`
	Loads        SampleCounts `json:"loads"`
	LastMismatch string       `json:"last_mismatch"` // empty: none
}

// SampleCounts are those of one direction.
type SampleCounts struct {
	Matched    uint64 `json:"matched"`
	Mismatched uint64 `json:"mismatched"` // the engine has other bytes than the pool
	Unverified uint64 `json:"unverified"` // not summed
}

func (c *SampleCounters) status() SampleCounts {
	return SampleCounts{c.matched.Load(), c.mismatched.Load(), c.unverified.Load()}
}

func (m *Metrics) sampleStatus(every uint32, lastMismatch string) SampleStatus {
	return SampleStatus{
		Every: every, Saves: m.Samples[transfer.Save].status(), Loads: m.Samples[transfer.Load].status(),
		LastMismatch: lastMismatch,
	}
}

package evict

const (
	slack       = 0.002 // hits per block looked up by which the policy may be worse than LRU
	marginStart = 128   // blocks by which it may be worse before it has been better, ...
	marginBase  = 256   // ... later on ...
	marginShare = 32    // ... and this part of the entries
	again       = 4     // after an alarm the next comes so many times as soon
)

// judge compares the policy with LRU, block by block.
type judge struct {
	lookups, hits, lru uint64  // blocks looked up; hits of the pool, and of LRU
	margin             float64 // blocks by which the policy may still fall behind
	alarms             uint64
}

// watch books so many hits more than LRU had. When the policy falls behind, what was learned is forgotten, and LRU decides for
// a while.
func (h *Hazard) watch(ahead, blocks int) {
	h.credit.book(ahead, blocks, h.entries)
	if h.humble.pass(blocks) {
		return
	}
	j, start := &h.judge, marginBase+float64(h.entries)/marginShare
	j.margin += float64(ahead) + slack*float64(blocks)
	if j.margin >= 2*start { // as far ahead as counts
		j.margin = 2 * start
		h.humble.forgive()
	}
	if j.margin < 0 {
		h.tables.forget()
		h.humble.begin(h.entries)
		j.margin = start / again
		j.alarms++
	}
}

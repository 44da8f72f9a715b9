package evict

const (
	slack       = 0.002 // hits per block looked up by which the policy may be worse than LRU
	marginStart = 128   // ... in blocks, before it has been better, ...
	marginBase  = 256   // ... later on, ...
	marginShare = 32    // ... plus this part of the entries
	again       = 4     // factor by which the next alarm comes sooner
)

// judge compares the policy with LRU, block by block.
type judge struct {
	lookups, hits, lru uint64  // blocks looked up; hits of the pool, and of LRU
	margin             float64 // blocks that the policy may still lose to LRU
	alarms             uint64
}

// record records hits beyond those of LRU. If the margin is used up, it forgets what it learned,
// and LRU decides for a while.
func (h *Hazard) record(ahead, blocks int) {
	h.missBudget.record(ahead, blocks, h.entries)
	if h.fallback.pass(blocks) {
		return
	}
	j, start := &h.judge, marginBase+float64(h.entries)/marginShare
	j.margin += float64(ahead) + slack*float64(blocks)
	if j.margin >= 2*start { // as far ahead as counts
		j.margin = 2 * start
		h.fallback.resetBackoff()
	}
	if j.margin < 0 {
		h.tables.forget()
		h.fallback.begin(h.entries)
		j.margin = start / again
		j.alarms++
	}
}

const (
	firstTurns = 8  // times the entries are the blocks looked up in which LRU decides after the first alarm
	mostTurns  = 96 // ... and after many: each alarm doubles it
)

// fallback is the time after an alarm in which LRU decides. The policy continues to learn, since
// its counts do not depend on what is evicted.
type fallback struct {
	turns int // of the next alarm
	left  int // blocks to be looked up
}

func (u *fallback) begin(entries int) {
	u.left = u.turns * entries
	u.turns = min(2*u.turns, mostTurns)
}

// resetBackoff makes the next alarm count as the first.
func (u *fallback) resetBackoff() { u.turns = firstTurns }

// pass passes some blocks, and reports whether the fallback lasts.
func (u *fallback) pass(blocks int) bool {
	u.left = max(0, u.left-blocks)
	return u.left > 0
}

// A block is lost if LRU still has it and the pool evicted it. Asking for a lost block is a hit of
// LRU and a miss of the pool, and stores it again. So if no more blocks are lost than the budget
// has, and each one that is asked for costs one of the budget, the budget bounds the deficit for
// any sequence of requests:
//
//	hits of the pool >= hits of LRU - giftShare * blocks looked up
//
// with LRU's room known to one part in 128. More is lent to a policy that is ahead of LRU, if its
// lost blocks were not asked for and are those of many prompts. In the worst case, all of that is
// asked for at once and at most leadShare of the blocks looked up so far are missed in addition,
// and are paid back before more is lent. The bound excludes pinned entries, pools with several
// kinds, and blocks that are not stored again.
const (
	giftShare = 0.0075 // blocks given for each block looked up
	// blocks lent at most for each block looked up: one for each hit more than LRU, up to this
	// share
	leadShare   = 0.02
	askedCost   = 10   // lost blocks not asked for that offset one that was
	manyPrompts = 16   // prompts that lost blocks must amount to: those of few may be asked for at once
	meanLooks   = 1024 // look-ups over which the size of a prompt is averaged
)

// missBudget is how many blocks may be lost. A new policy follows LRU; it may risk what it gains.
type missBudget struct {
	// given and gained, less the lost blocks that were asked for; within plus or minus the entries
	blocks float64
	// lost blocks that LRU evicted too before they were asked for, less askedCost for each lost
	// block that was asked for
	calm   float64
	lead   float64 // hits beyond those of LRU, since the start
	all    float64 // blocks looked up, since the start
	looked float64 // ... and recently
	square float64 // sum of the squares of the same look-ups
}

// members returns all fields, in the order in which they are saved.
func (c *missBudget) members() [6]*float64 {
	return [...]*float64{&c.blocks, &c.calm, &c.lead, &c.all, &c.looked, &c.square}
}

// record records a look-up, in which the policy had this many hits more than LRU.
func (c *missBudget) record(ahead, blocks, entries int) {
	n, most := float64(blocks), max(c.blocks, float64(entries)) // a restart's budget stays
	c.blocks = max(-float64(entries), min(most, c.blocks+float64(ahead)+giftShare*n))
	c.lead += float64(ahead)
	c.all += n
	c.looked += n - c.looked/meanLooks
	c.square += n*n - c.square/meanLooks
}

// note records the end of lost blocks: some were asked for, LRU evicted others too.
func (c *missBudget) note(asked, passed, entries int) {
	if asked == 0 && passed == 0 {
		return
	}
	most := float64(entries)
	c.calm = max(-askedCost*most, min(most, c.calm+float64(passed)-askedCost*float64(asked)))
}

// mayLose returns how many blocks may be lost in total.
func (c *missBudget) mayLose(lost int) float64 {
	return c.blocks + c.trust(float64(lost))*max(0, min(c.lead, leadShare*c.all))
}

// trust returns 1 if as many blocks as are lost now were lost and not asked for, and they amount to
// many prompts; otherwise less.
func (c *missBudget) trust(lost float64) float64 {
	prompt := 1 + c.square/max(1, c.looked) // of the mean block
	return max(0, min(1, c.calm/max(1, lost))) * min(1, lost/(manyPrompts*prompt))
}

// mayDeviate reports whether the policy decides: one more block that LRU would have may be lost.
func (h *Hazard) mayDeviate() bool {
	more := float64(h.lost) + 1
	switch {
	case h.fallback.left > 0:
		return false
	case more <= h.missBudget.blocks: // at any trust
		return true
	}
	return more <= h.missBudget.mayLose(h.lost)
}

package evict

// A block is lost if LRU still has it and the pool evicted it. Asking for a lost block is
// a hit of LRU and a miss of the pool, and stores it again. So if no more blocks are lost than the
// budget has, and each one that is asked for costs one of the budget, the budget bounds the deficit
// for any sequence of requests:
//
//	hits of the pool >= hits of LRU - giftShare * blocks looked up - entries / lent
//
// with LRU's room known to one part in 128. More is lent to a policy that is ahead of LRU, if its
// lost blocks were not asked for and are those of many prompts. In the worst case, all of that is
// asked for at once and at most leadShare of the blocks looked up so far are missed in addition,
// and are paid back before more is lent. The bound excludes pinned entries, pools with several
// kinds, and blocks that are not stored again.
//
// The budget is for what may happen; harm is what has happened. At harmShare below LRU, but not for
// a few blocks at the start, what was learned is mostly forgotten, and LRU decides until half of
// the harm is made up. What is then still lost can make the harm greater, but nothing else can: the
// policy is not charged for hits that a pool with blocks on their way in and out lacks whoever
// decides. So LRU never decides for ever.
const (
	giftShare = 0.0075 // blocks given for each block looked up
	harmShare = 0.0035 // hits fewer than LRU's per block looked up from which LRU decides
	harmLooks = 4      // blocks looked up for each entry that harm is measured by at least
	lent      = 8      // part of the entries that may be lost before anything is earned
	// blocks lent at most for each block looked up: one for each hit more than LRU, up to this
	// share
	leadShare   = 0.02
	askedCost   = 10   // lost blocks not asked for that offset one that was
	manyPrompts = 16   // prompts that lost blocks must amount to: those of few may be asked for at once
	meanLooks   = 1024 // look-ups over which the size of a prompt is averaged
)

// judge compares the policy with LRU, block by block.
type judge struct {
	lookups, hits, lru uint64 // blocks looked up; hits of the pool, and of LRU
	harm               bool   // LRU decides
	most               int64  // hits fewer than LRU's that count while it does
	alarms             uint64 // times that it began
}

// note counts a look-up, and reports whether harm begins. Of entries, lost are missing that LRU
// would have.
func (j *judge) note(blocks, hits, lru, lost, entries int) (begins bool) {
	j.lookups += uint64(blocks)
	j.hits += uint64(hits)
	j.lru += uint64(lru)
	deficit := int64(j.lru - j.hits)
	if over := deficit - j.most; j.harm && over > 0 {
		j.lru -= uint64(over)
		deficit = j.most
	}
	bound := harmShare * float64(j.lookups)
	begins = !j.harm && float64(deficit) > max(bound, harmShare*harmLooks*float64(entries))
	j.harm = begins || j.harm && float64(deficit) > bound/2
	if begins {
		j.most = deficit + int64(lost)
		j.alarms++
	}
	return begins
}

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

// mayMiss returns how many blocks that LRU would have may be lost in total.
func (h *Hazard) mayMiss() float64 {
	return float64(h.entries)/lent + h.missBudget.mayLose(h.lost)
}

// mayDeviate reports whether the policy decides: one more block that LRU would have may be lost.
func (h *Hazard) mayDeviate() bool { return !h.judge.harm && float64(h.lost+1) <= h.mayMiss() }

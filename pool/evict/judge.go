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

// watch books so many hits more than LRU had. When the policy falls behind, what was learned is
// forgotten, and LRU decides for a while.
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

// humble is the time after an alarm in which the policy does as LRU does. It goes on learning: what
// is counted does not depend on what is evicted.
type fallback struct {
	turns int // of the next alarm
	left  int // blocks to be looked up
}

func (u *fallback) begin(entries int) {
	u.left = u.turns * entries
	u.turns = min(2*u.turns, mostTurns)
}

// forgive makes the next alarm the first.
func (u *fallback) resetBackoff() { u.turns = firstTurns }

// pass lets some blocks pass, and says whether the time is not over.
func (u *fallback) pass(blocks int) bool {
	u.left = max(0, u.left-blocks)
	return u.left > 0
}

// A block that LRU hits and the pool misses is one that was lost, and it is stored again then. So
// if never more blocks are lost than there is credit, and each costs one of the credit when it is
// asked for, the credit is never overdrawn:
//
//	hits of the pool >= hits of LRU - giftShare * blocks looked up
//
// at any time, whatever is asked for; LRU with one part in 128 of room less or more. More is lent
// only to a policy that is ahead of LRU, where what was lost so far was not asked for, and it is of
// many prompts: if all of that is asked for at once after all, at most leadShare of the blocks
// looked up until then are lost besides, and paid back before anything is lent again. Beside the
// bound are entries that are held or of several kinds, and blocks that are not stored again.
const (
	giftShare = 0.0075 // blocks given for each block looked up
	// blocks lent, when all goes well, for each block looked up: one for each hit that LRU has not,
	// up to this share
	leadShare   = 0.02
	askedCost   = 10   // lost blocks not asked for that make up for one that was
	manyPrompts = 16   // prompts that what is lost must be as much as: that of few may be asked for at once
	meanLooks   = 1024 // look-ups over which the size of a prompt is averaged
)

// credit is how far the policy may be from LRU. A fresh one does as LRU does; what it wins it may
// risk.
type missBudget struct {
	// given, and won, less those that were asked for when they were lost; as many as entries at
	// most, either way
	blocks float64
	// lost blocks that LRU gave up too before they were asked for, less askedCost for each that was
	// asked for
	calm   float64
	lead   float64 // hits more than LRU, since the start
	all    float64 // blocks looked up, since the start
	looked float64 // ... and those of late
	square float64 // sum of the squares of the same look-ups
}

// members are all of them, in the order in which they are kept over a restart.
func (c *missBudget) members() [6]*float64 {
	return [...]*float64{&c.blocks, &c.calm, &c.lead, &c.all, &c.looked, &c.square}
}

// book takes in a look-up of some blocks, of which the policy hit so many more than LRU.
func (c *missBudget) record(ahead, blocks, entries int) {
	n, most := float64(blocks), max(c.blocks, float64(entries)) // what was brought along from before a restart stays
	c.blocks = max(-float64(entries), min(most, c.blocks+float64(ahead)+giftShare*n))
	c.lead += float64(ahead)
	c.all += n
	c.looked += n - c.looked/meanLooks
	c.square += n*n - c.square/meanLooks
}

// note takes in what became of lost blocks: some were asked for, others LRU gave up too.
func (c *missBudget) note(asked, passed, entries int) {
	if asked == 0 && passed == 0 {
		return
	}
	most := float64(entries)
	c.calm = max(-askedCost*most, min(most, c.calm+float64(passed)-askedCost*float64(asked)))
}

// mayLose is how many blocks may be lost, of which some are.
func (c *missBudget) mayLose(lost int) float64 {
	return c.blocks + c.trust(float64(lost))*max(0, min(c.lead, leadShare*c.all))
}

// trust is 1 if as many blocks as are lost have gone unasked for, and they are as much as many
// prompts; else it is less.
func (c *missBudget) trust(lost float64) float64 {
	prompt := 1 + c.square/max(1, c.looked) // of the mean block
	return max(0, min(1, c.calm/max(1, lost))) * min(1, lost/(manyPrompts*prompt))
}

// bold says that the policy decides: one more block that LRU would have may be lost.
func (h *Hazard) mayDeviate() bool {
	more := float64(h.lost) + 1
	switch {
	case h.fallback.left > 0:
		return false
	case more <= h.missBudget.blocks: // whatever the trust
		return true
	}
	return more <= h.missBudget.mayLose(h.lost)
}

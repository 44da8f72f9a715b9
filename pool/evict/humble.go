package evict

const (
	firstTurns = 8  // times the entries are the blocks looked up in which LRU decides after the first alarm
	mostTurns  = 96 // ... and after many: each alarm doubles it
)

// humble is the time after an alarm in which the policy does as LRU does. It goes on learning: what is counted does
// not depend on what is evicted.
type humble struct {
	turns int // of the next alarm
	left  int // blocks to be looked up
}

func (u *humble) begin(entries int) {
	u.left = u.turns * entries
	u.turns = min(2*u.turns, mostTurns)
}

// forgive makes the next alarm the first.
func (u *humble) forgive() { u.turns = firstTurns }

// pass lets some blocks pass, and says whether the time is not over.
func (u *humble) pass(blocks int) bool {
	u.left = max(0, u.left-blocks)
	return u.left > 0
}

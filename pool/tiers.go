package pool

import "time"

// Tiers is what a pool that has tiers below its memory can do besides. Through its Index an entry of a tier that is known
// to be there is stored like one in memory: Prefix and Exists count it, and Pin promises it. A promise is a Ref like a pin:
// the entry is being brought to memory, and is pinned there once it came. Unpin ends it, whatever became of it.
type Tiers interface {
	// Ask finds out what the tiers have of the chains, where that is not known, and waits for it until the deadline at most.
	// It says whether some tier is still asked then: what it answers will be known to a later call.
	Ask(s SpaceID, asked []Asked, deadline time.Time) (pending bool)
	// Settle calls then, once, from any goroutine and maybe before it returns, when no ref is a promise that is still open:
	// each entry is pinned in memory, or did not come and Acquire will find it Missing. It does not keep refs. cancel makes sure
	// that then is not called any more, and says whether it had not been.
	Settle(refs []Ref, then func()) (cancel func() bool)
}

// Asked is a chain of one group that a look-up will ask the Index for.
type Asked struct {
	Group  uint8
	Hashes Hashes
}

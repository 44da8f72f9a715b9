package evict

const (
	askedAgain   = 5000 // ms within which the same chain is taken for the same request
	recentChains = 1024
)

// recent are the chains looked up last, by their end: schedulers ask for a request more than once.
type recent [recentChains]struct {
	end  uint64
	used uint32 // ms
}

// again notes a chain, and says whether it was noted a moment ago.
func (r *recent) again(end uint64, length int, now uint32) bool {
	end ^= uint64(length) * 0x9e3779b97f4a7c15
	c := &r[end%recentChains]
	same := c.end == end && now-c.used < askedAgain
	c.end, c.used = end, now
	return same
}

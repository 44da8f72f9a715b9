package evict

const (
	askedAgain   = 5000 // ms within which the same chain is taken for the same request ...
	askedAtOnce  = 500  // ... and ms within which it certainly is: schedulers ask at every step
	recentChains = 1024
)

// recent are the chains looked up last, by their end: schedulers ask for a request more than once.
type recent [recentChains]struct {
	end  uint64
	used uint32 // ms
}

// last notes a chain, and gives the ms since it was noted; askedAgain if that is not known.
func (r *recent) last(end uint64, length int, now uint32) (ago uint32) {
	end ^= uint64(length) * 0x9e3779b97f4a7c15
	c := &r[end%recentChains]
	if ago = askedAgain; c.end == end {
		ago = now - c.used
	}
	c.end, c.used = end, now
	return ago
}

package evict

// run is entries of one class that were last used at about the same time, such as most blocks of one prompt. They age together: it is
// runs that pass from bin to bin, not entries.
//
//	class c:  newest ── run ── run ── │ ── run ── │ ... ── run ── oldest     │ is between bins
//	                    └ first ... last: the entries, the oldest first
type run struct {
	used         uint32 // time of the last use, ms; wraps after 49 days, which only ages wrongly
	newer, older uint32 // runs of the class, 0 at the ends
	first, last  uint32 // entries
	count        uint8  // entries, maxRun at most
	class        uint8
	bin          uint8
	half         uint8
}

const maxRun = 1<<8 - 1

// runs grow with the most that there were at once. Number 0 is none.
type runs struct {
	pages[run]
	made uint32 // numbers given so far
	free uint32 // the first of those given back; run.newer is the next
}

// number is one that is not in use.
func (r *runs) number() uint32 {
	id := r.free
	if id != 0 {
		r.free = r.at(id).newer
		return id
	}
	r.made++
	r.make(r.made)
	return r.made
}

func (r *runs) giveBack(id uint32) {
	r.at(id).newer, r.free = r.free, id
}

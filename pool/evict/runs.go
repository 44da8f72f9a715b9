package evict

// run is entries that follow one another in the list of their class and were last used at the same time, such as most blocks of
// one prompt. They age together: it is runs that pass from bin to bin, not entries.
//
//	class c:  newest ── run ── run ── │ ── run ── │ ... ── run ── oldest     │ is between bins
//	                    └ first entry: the oldest of the run
type run struct {
	used  uint32 // time of the last use, ms; wraps after 49 days, which only ages wrongly
	newer uint32 // the run before it in the list, 0 if it is the newest
	first uint32 // entry
	count uint16 // entries, maxRun at most
	class uint8
	bin   uint8
}

const maxRun = 1<<16 - 1

// runs grow with the most that there were at once. Number 0 is none.
type runs struct {
	pages[run]
	made uint32 // numbers given so far
	free uint32 // the first of those given back; run.newer is the next
}

// put makes a run of one entry, the newest of its class. It is written field by field: a run made elsewhere and copied is read before it
// is written, and the processor waits for that.
func (r *runs) put(e uint32, class, bin uint8, used uint32) uint32 {
	id := r.free
	if id != 0 {
		r.free = r.at(id).newer
	} else {
		r.made++
		id = r.made
		r.make(id)
	}
	x := r.at(id)
	x.used, x.newer, x.first, x.count, x.class, x.bin = used, 0, e, 1, class, bin
	return id
}

func (r *runs) remove(id uint32) {
	r.at(id).newer, r.free = r.free, id
}

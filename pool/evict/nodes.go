package evict

// node is the state of one entry; entry numbers are node numbers, 0 is none.
type node struct {
	print        uint64
	newer, older uint32 // in its run
	run          uint32
	passed       uint16 // the ms in which it was passed over last, as Hazard.passing counts them
	kind         uint8
	state        uint8
}

// Bits of node.state.
const (
	statePresent = 1 << iota // the policy has the entry
	stateDescent             // it is on the descent
)

// nodes grow with the greatest entry number.
type nodes struct {
	pages[node]
	runs runs
	seen uint32 // keeps the loads of preload alive
}

// find returns the node of an entry that the policy has; nil otherwise.
func (t *nodes) find(e uint32) *node {
	if !t.has(e) {
		return nil
	}
	if n := t.at(e); n.state&statePresent != 0 {
		return n
	}
	return nil
}

// match returns the node of an entry if it still has the print; nil otherwise.
func (t *nodes) match(e uint32, print uint64) *node {
	if n := t.find(e); n != nil && n.print == print {
		return n
	}
	return nil
}

// runOf returns the run of an entry.
func (t *nodes) runOf(n *node) *run { return t.runs.at(n.run) }

// preload reads nodes that are used one by one afterwards, so that their cache misses overlap.
func (t *nodes) preload(entries []uint32) {
	for _, e := range entries {
		if t.has(e) {
			t.seen += t.at(e).run
		}
	}
}

// millis converts a pool's time to that of nodes.
func millis(now int64) uint32 { return uint32(now / 1e6) }

// run is a run of entries of one class that were last used at about the same time, such as most
// blocks of one prompt. They age together: runs, not entries, move from bin to bin.
//
//	class c:  newest ── run ── run ── │ ── run ── │ ... ── run ── oldest     │ is between bins
//	                    └ first ... last: the entries, the oldest first
type run struct {
	used         uint32 // time of the last use, ms; wraps after 49 days, which only ages wrongly
	newer, older uint32 // runs of the class, 0 at the ends
	first, last  uint32 // entries
	count        uint8  // entries, maxRun at most
	class        uint16
	bin          uint8
	half         uint8
}

const maxRun = 1<<8 - 1

// runs grow with their greatest number so far. Number 0 is none.
type runs struct {
	pages[run]
	made uint32 // numbers given so far
	free uint32 // the first of those given back; run.newer is the next
}

// alloc returns an unused number.
func (r *runs) alloc() uint32 {
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

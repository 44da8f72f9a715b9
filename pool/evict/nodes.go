package evict

// node is what the policy keeps of one entry; numbers of entries name nodes, 0 is none.
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
	stateKnown = 1 << iota // the policy has the entry
	stateOnWay             // it is on the way
)

// nodes grow with the greatest number of an entry.
type nodes struct {
	pages[node]
	runs runs
	seen uint32 // what preload read
}

// known is the node of an entry that the policy has; nil otherwise.
func (t *nodes) known(e uint32) *node {
	if !t.has(e) {
		return nil
	}
	if n := t.at(e); n.state&stateKnown != 0 {
		return n
	}
	return nil
}

// like is the node of an entry if that still has the print; nil otherwise.
func (t *nodes) like(e uint32, print uint64) *node {
	if n := t.known(e); n != nil && n.print == print {
		return n
	}
	return nil
}

// runOf is the run of an entry.
func (t *nodes) runOf(n *node) *run { return t.runs.at(n.run) }

// preload reads the nodes of entries that are looked at one after the other afterwards: the processor waits for all of them at once.
func (t *nodes) preload(entries []uint32) {
	for _, e := range entries {
		if t.has(e) {
			t.seen += t.at(e).run
		}
	}
}

// millis is a pool's time as nodes keep it.
func millis(now int64) uint32 { return uint32(now / 1e6) }

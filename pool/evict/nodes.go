package evict

// node is what the policy keeps of one entry; numbers of entries name nodes, 0 is none.
type node struct {
	print        uint64
	newer, older uint32 // in the list of its class, by the time of its last use
	recent       links  // in what LRU would have, if it would have the entry
	run          uint32
	kind         uint8
	state        uint8
}

// links of a list by last use, whose members are entries and lost blocks.
type links struct{ newer, older uint32 }

// Bits of node.state.
const (
	stateKnown  = 1 << iota // the policy has the entry
	stateOnWay              // it is on the way
	stateRecent             // LRU would have it too
	stateFresh              // it is being inserted
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

// runOf is the run of an entry that is in a list.
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

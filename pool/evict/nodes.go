package evict

import "unsafe"

// node is what a policy keeps of one entry; numbers of entries name nodes, 0 is none.
type node struct {
	print        uint64
	newer, older uint32 // in the list of its class, by the time of its last use
	recent       links  // in what LRU would have, if it would have the entry
	used         uint32 // time of its last use, ms; wraps after 49 days, which only ages wrongly
	kind         uint8
	class        uint8
	bin          uint8
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

const (
	pageBits = 12
	pageLen  = 1 << pageBits // nodes of one page: grown by pages, so that no insertion waits for a copy of all
)

// nodes grows with the greatest number of an entry.
type nodes struct {
	pages []*[pageLen]node
	seen  uint32 // what preload read
}

func (t *nodes) at(e uint32) *node { return &t.pages[e>>pageBits][e&(pageLen-1)] }

// known is the node of an entry that the policy has; nil otherwise.
func (t *nodes) known(e uint32) *node {
	if int(e>>pageBits) >= len(t.pages) {
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

// preload reads the nodes of entries that are looked at one after the other afterwards: the processor waits for all of them at once.
func (t *nodes) preload(entries []uint32) {
	for _, e := range entries {
		if int(e>>pageBits) < len(t.pages) {
			t.seen += t.at(e).used
		}
	}
}

// make is the node of an entry, which may not be there yet.
func (t *nodes) make(e uint32) *node {
	for int(e>>pageBits) >= len(t.pages) {
		t.pages = append(t.pages, new([pageLen]node))
	}
	return t.at(e)
}

func (t *nodes) bytes() int64 {
	return int64(len(t.pages)) * int64(unsafe.Sizeof([pageLen]node{})+unsafe.Sizeof(&t.pages[0]))
}

// millis is a pool's time as nodes keep it.
func millis(now int64) uint32 { return uint32(now / 1e6) }

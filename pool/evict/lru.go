package evict

import "github.com/kvagent/kvagent/pool"

// LRU evicts the least recently used entry without children.
type LRU struct {
	nodes   lruNodes
	list    [pool.MaxKinds]order
	entries int
}

// lruNode is the state of one entry.
type lruNode struct {
	print        uint64
	newer, older uint32 // in the list of its kind, by the time of its last use
	used         uint32 // time of its last use, ms
	kind         uint8
	known        bool
}

// lruNodes grow with the greatest entry number.
type lruNodes struct{ pages[lruNode] }

// find returns the node of an entry that LRU has; nil otherwise.
func (t *lruNodes) find(e uint32) *lruNode {
	if t.has(e) && t.at(e).known {
		return t.at(e)
	}
	return nil
}

// match returns the node of an entry if it still has the print; nil otherwise.
func (t *lruNodes) match(e uint32, print uint64) *lruNode {
	if n := t.find(e); n != nil && n.print == print {
		return n
	}
	return nil
}

// order is a list by use.
type order struct{ newest, oldest uint32 }

// NewLRU returns an LRU without entries.
func NewLRU() *LRU { return &LRU{} }

// Access implements pool.Policy. A block becomes more recent than those after it in the chain.
func (l *LRU) Access(u *pool.Use) {
	now := millis(u.Now)
	for i := len(u.Entries) - 1; i >= 0; i-- {
		if n := l.nodes.match(u.Entries[i], u.Prints[i]); n != nil {
			n.used = now
			o := &l.list[n.kind]
			o.remove(&l.nodes, u.Entries[i])
			o.push(&l.nodes, u.Entries[i])
		}
	}
}

// Insert implements pool.Policy.
func (l *LRU) Insert(in *pool.Insertion) {
	now := millis(in.Now)
	for i := len(in.Entries) - 1; i >= 0; i-- {
		e := in.Entries[i]
		n := l.nodes.make(e)
		if n.known {
			continue
		}
		*n = lruNode{print: in.Prints[i], used: now, kind: in.Kind, known: true}
		l.list[in.Kind].push(&l.nodes, e)
		l.entries++
	}
}

// Remove implements pool.Policy.
func (l *LRU) Remove(entries []uint32) {
	for _, e := range entries {
		if n := l.nodes.find(e); n != nil {
			l.list[n.kind].remove(&l.nodes, e)
			n.known = false
			l.entries--
		}
	}
}

// Advise implements pool.Policy.
func (l *LRU) Advise(*pool.Advice) {}

// Victim implements pool.Policy. It refuses nothing.
func (l *LRU) Victim(now int64, kinds, _ uint64, v pool.View) uint32 {
	for range maxSteps {
		o, e := l.oldest(kinds, millis(now))
		if e == 0 {
			return 0
		}
		child := v.Child(e)
		if child == 0 && !v.Held(e) {
			return e
		}
		o.remove(&l.nodes, e)
		if child != 0 && l.nodes.find(child) != nil {
			o.pushAbove(&l.nodes, child, e) // it is as recent as its child
		} else {
			l.nodes.at(e).used = millis(now) // it is in use
			o.push(&l.nodes, e)
		}
	}
	return 0
}

// oldest returns the least recently used entry of the kinds.
func (l *LRU) oldest(kinds uint64, now uint32) (o *order, e uint32) {
	var age uint32
	for k := range kindsIn(kinds) {
		first := l.list[k].oldest
		if first == 0 {
			continue
		}
		if a := now - l.nodes.at(first).used; e == 0 || a > age {
			o, e, age = &l.list[k], first, a
		}
	}
	return o, e
}

// Class implements pool.Policy.
func (l *LRU) Class(uint32) string { return "" }

// Report implements pool.Policy.
func (l *LRU) Report() pool.PolicyReport {
	return pool.PolicyReport{Name: "lru", Entries: l.entries, Bytes: l.nodes.bytes()}
}

func (o *order) push(t *lruNodes, e uint32) {
	n := t.at(e)
	n.newer, n.older = 0, o.newest
	if o.newest != 0 {
		t.at(o.newest).newer = e
	} else {
		o.oldest = e
	}
	o.newest = e
}

// pushAbove inserts e just above another entry of the list.
func (o *order) pushAbove(t *lruNodes, below, e uint32) {
	b, n := t.at(below), t.at(e)
	n.used = b.used
	if b.newer == 0 {
		o.push(t, e)
		return
	}
	n.newer, n.older = b.newer, below
	t.at(b.newer).older = e
	b.newer = e
}

func (o *order) remove(t *lruNodes, e uint32) {
	n := t.at(e)
	if n.newer != 0 {
		t.at(n.newer).older = n.older
	} else {
		o.newest = n.older
	}
	if n.older != 0 {
		t.at(n.older).newer = n.newer
	} else {
		o.oldest = n.newer
	}
	n.newer, n.older = 0, 0
}

// millis converts a pool's time to that of entries.
func millis(now int64) uint32 { return uint32(now / 1e6) }

package evict

import (
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/advisor"
)

// Names of policies, the values of --eviction.
const (
	HazardName = "hazard"
	LRUName    = "lru"

	DefaultName = HazardName
)

// Names lists all of them.
var Names = []string{HazardName, LRUName}

// Named returns a new policy of this name.
func Named(eviction string) advisor.Policy {
	if eviction == LRUName {
		return NewLRU()
	}
	return NewHazard()
}

// LRU evicts the least recently used entry without children.
type LRU struct {
	nodes   pages[lruNode] // they grow with the greatest entry number
	list    [pool.MaxKinds]order
	entries int
}

// lruNode is the state of one entry.
type lruNode struct {
	print uint64
	links        // in the order of its kind
	used  uint32 // time of its last use, ms
	kind  uint8
	known bool
}

// find returns the node of an entry that LRU has; nil otherwise.
func (l *LRU) find(e uint32) *lruNode {
	if l.nodes.has(e) && l.nodes.at(e).known {
		return l.nodes.at(e)
	}
	return nil
}

// NewLRU returns an LRU without entries.
func NewLRU() *LRU { return &LRU{} }

// Access implements advisor.Policy. A block becomes more recent than those after it in the chain.
func (l *LRU) Access(u *pool.Use) {
	now := millis(u.Now)
	for i := len(u.Entries) - 1; i >= 0; i-- {
		if n := l.find(u.Entries[i]); n != nil && n.print == u.Prints[i] {
			l.use(u.Entries[i], n, now)
		}
	}
}

// use makes an entry the newest of its kind.
func (l *LRU) use(e uint32, n *lruNode, now uint32) {
	n.used = now
	o := &l.list[n.kind]
	remove(o, l.nodes, e)
	insert(o, l.nodes, e, o.newest)
}

// Insert implements advisor.Policy.
func (l *LRU) Insert(in *pool.Insertion) {
	now := millis(in.Now)
	for i := len(in.Entries) - 1; i >= 0; i-- {
		e := in.Entries[i]
		n := l.nodes.make(e)
		if n.known {
			continue
		}
		*n = lruNode{print: in.Prints[i], used: now, kind: in.Kind, known: true}
		insert(&l.list[in.Kind], l.nodes, e, l.list[in.Kind].newest)
		l.entries++
	}
}

// Remove implements advisor.Policy.
func (l *LRU) Remove(entries []uint32) {
	for _, e := range entries {
		if n := l.find(e); n != nil {
			remove(&l.list[n.kind], l.nodes, e)
			n.known = false
			l.entries--
		}
	}
}

// Advise implements advisor.Policy.
func (l *LRU) Advise(*pool.Advice) {}

// Victim implements advisor.Policy. It refuses nothing.
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
		n, x := l.nodes.at(e), l.find(child)
		if x == nil {
			l.use(e, n, millis(now)) // it is in use
			continue
		}
		n.used = x.used // it is as recent as its child
		remove(o, l.nodes, e)
		insert(o, l.nodes, e, child)
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

// Class implements advisor.Policy.
func (l *LRU) Class(uint32) string { return "" }

// Report implements advisor.Policy.
func (l *LRU) Report() pool.PolicyReport {
	return pool.PolicyReport{Name: "lru", Entries: l.entries, Bytes: l.nodes.bytes()}
}

// millis converts a pool's time to that of entries.
func millis(now int64) uint32 { return uint32(now / 1e6) }

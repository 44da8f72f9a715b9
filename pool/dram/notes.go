package dram

import "github.com/kvagent/kvagent/pool"

// maxNotes bounds the names of entries that wait to be taken: 40 bytes each, in two lists.
const maxNotes = 1 << 14

// notes are the entries of watched spaces that came or went. The pool's lock guards them.
type notes struct {
	list    []pool.Change // nil: no space is watched
	lost    bool
	changed chan struct{} // cap 1: there is something to take
}

// note notes an entry that has become visible, or is about to be dropped.
func (c *core) note(e uint32) {
	if c.notes.list == nil {
		return
	}
	r := &c.recs.All[e]
	m := &c.realms[r.ident.realm()]
	if !m.space.watched || m.over {
		return
	}
	if len(c.notes.list) == maxNotes {
		c.notes.lost = true
		return
	}
	c.notes.list = append(c.notes.list,
		pool.Change{Space: m.space.id, Group: r.ident.group(), Hash: r.hash.Bytes(r.ident.hashLen())})
	c.notes.signal()
}

// noteAll notes that a realm ends.
func (c *core) noteAll(realm uint32) {
	if c.realms[realm].space.watched {
		c.notes.lost = true
		c.notes.signal()
	}
}

func (n *notes) signal() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// Watch implements pool.Journal.
func (p *Pool) Watch(s pool.SpaceID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if sp := p.core.space(s); sp != nil {
		sp.watched = true
		if p.core.notes.list == nil {
			p.core.notes.list = make([]pool.Change, 0, maxNotes)
		}
	}
}

// Changed implements pool.Journal.
func (p *Pool) Changed() <-chan struct{} { return p.core.notes.changed }

// Changes implements pool.Journal. It exchanges two lists: its time does not depend on the notes.
func (p *Pool) Changes(empty []pool.Change) (all []pool.Change, lost bool) {
	if cap(empty) < maxNotes {
		empty = make([]pool.Change, 0, maxNotes)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	n := &p.core.notes
	all, lost = n.list, n.lost
	n.list, n.lost = empty[:0], false
	return all, lost
}

// Holds implements pool.Journal.
func (p *Pool) Holds(s pool.SpaceID, group uint8, h pool.Hashes, present []bool) (open bool) {
	p.Exists(s, group, h, present)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.core.space(s) != nil
}

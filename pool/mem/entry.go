package mem

import "github.com/kvagent/kvagent/pool"

func (e *entry) bytes() (n int64) {
	for _, s := range e.shards {
		n += slotBytes(s.len)
	}
	return n
}

func (e *entry) slot(shard uint8) pool.Slot {
	s := &e.shards[shard]
	return pool.Slot{Ref: e.ref, Off: s.off, Len: s.len, Sum: s.sum, Shard: shard}
}

func (e *entry) writing() bool {
	for _, s := range e.shards {
		if s.writing {
			return true
		}
	}
	return false
}

func (e *entry) held() bool { return e.pins > 0 || e.writing() }

func (e *entry) count() (present int) {
	for _, s := range e.shards {
		if s.present {
			present++
		}
	}
	return present
}

// settle updates the state of e after the end of a pin or a reservation.
func (p *Pool) settle(e *entry) {
	switch {
	case e.dropped:
		if !e.held() {
			p.release(e)
		}
	case e.place != nil:
	case e.count() == len(e.shards):
		e.place = p.recent.PushFront(e)
	case e.held():
	case e.count() == 0:
		p.drop(e)
	default:
		e.idle = p.now()
	}
}

// drop makes an entry unfindable at once; its slots are freed when it is no longer held. Its
// children become roots, and are linked again when the entry is stored again.
func (p *Pool) drop(e *entry) {
	e.dropped = true
	delete(p.entries, e.key)
	if e.place != nil {
		p.recent.Remove(e.place)
		e.place = nil
	}
	if e.parent != nil {
		delete(e.parent.children, e)
		e.parent = nil
	}
	for c := range e.children {
		c.parent = nil
	}
	e.children = nil
	if !e.held() {
		p.release(e)
	}
}

func (p *Pool) release(e *entry) {
	delete(p.refs, e.ref)
	for _, s := range e.shards {
		p.free.give(s.off, slotBytes(s.len))
	}
}

package mem

// allocate finds n bytes, and evicts until it does or nothing more can go.
func (p *Pool) allocate(n int64) (off int64, ok bool) {
	for {
		if off, ok = p.free.take(n); ok {
			return off, true
		}
		if !p.reclaimPartial() && !p.evictOldest() {
			return 0, false
		}
	}
}

// evictOldest takes the least recently used entry that nobody holds and nothing hangs on: a suffix goes
// before its prefix.
func (p *Pool) evictOldest() bool {
	for at := p.recent.Back(); at != nil; at = at.Prev() {
		e := at.Value.(*entry)
		if e.held() || len(e.children) > 0 {
			continue
		}
		p.drop(e)
		p.stats.Evicted++
		return true
	}
	return false
}

// reclaimPartial takes one entry that lacks shards nobody writes, with all that hangs on it.
func (p *Pool) reclaimPartial() bool {
	for _, e := range p.entries {
		if e.place == nil && !treeHeld(e) {
			p.dropTree(e)
			return true
		}
	}
	return false
}

// reclaimOld takes all entries that have lacked shards for PartialAge.
func (p *Pool) reclaimOld() {
	for _, e := range p.entries {
		if !e.dropped && e.place == nil && !treeHeld(e) && p.now().Sub(e.idle) >= PartialAge {
			p.dropTree(e)
		}
	}
}

func treeHeld(e *entry) bool {
	if e.held() {
		return true
	}
	for c := range e.children {
		if treeHeld(c) {
			return true
		}
	}
	return false
}

func (p *Pool) dropTree(e *entry) {
	for c := range e.children {
		p.dropTree(c)
	}
	p.drop(e)
	p.stats.Evicted++
}

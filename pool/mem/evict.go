package mem

import "slices"

// allocate finds n bytes, evicting until it does or nothing more can be evicted. It keeps the
// shards already allocated for the same entry.
func (p *Pool) allocate(n int64, taken []shard) (off int64, ok bool) {
	for {
		if off, ok = p.free.take(n); ok {
			return off, true
		}
		if p.free.sum() >= n {
			p.compact(taken)
			if off, ok = p.free.take(n); ok {
				return off, true
			}
		}
		if !p.reclaimPartial() && !p.evictOldest() {
			return 0, false
		}
	}
}

// evictOldest evicts the least recently used entry that is not held and has no children: a suffix
// goes before its prefix.
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

// reclaimPartial evicts one entry that lacks shards which no job is writing, or the end of a chain
// below it.
func (p *Pool) reclaimPartial() bool {
	for _, e := range p.entries {
		if e.place == nil && !treeHeld(e) {
			p.drop(endOf(e))
			p.stats.Evicted++
			return true
		}
	}
	return false
}

func endOf(e *entry) *entry {
	for c := range e.children {
		return endOf(c)
	}
	return e
}

// reclaimOld evicts all entries that have lacked shards for PartialAge.
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

// compact moves all shards of entries that are not held towards the start of the arena, around the
// others.
func (p *Pool) compact(taken []shard) {
	type place struct {
		*shard
		stays bool
	}
	var all []place
	for i := range taken {
		all = append(all, place{&taken[i], true})
	}
	for _, e := range p.refs {
		for i := range e.shards {
			all = append(all, place{&e.shards[i], e.held()})
		}
	}
	slices.SortFunc(all, func(a, b place) int { return int(a.off - b.off) })
	p.free = p.free[:0]
	end := int64(0)
	for _, s := range all {
		if s.stays && s.off > end {
			p.free = append(p.free, extent{end, s.off - end})
		}
		if !s.stays {
			copy(p.arena[end:], p.arena[s.off:][:s.len])
			s.off = end
		}
		end = s.off + slotBytes(s.len)
	}
	if size := int64(len(p.arena)); end < size {
		p.free = append(p.free, extent{end, size - end})
	}
}

type extent struct{ off, len int64 }

// extents are the free ranges of the arena, by offset, never two adjacent ones.
type extents []extent

func (e *extents) take(n int64) (off int64, ok bool) {
	for i := range *e {
		x := &(*e)[i]
		if x.len < n {
			continue
		}
		off = x.off
		x.off, x.len = x.off+n, x.len-n
		if x.len == 0 {
			*e = slices.Delete(*e, i, i+1)
		}
		return off, true
	}
	return 0, false
}

func (e *extents) give(off, n int64) {
	i, _ := slices.BinarySearchFunc(*e, off, func(x extent, off int64) int { return int(x.off - off) })
	*e = slices.Insert(*e, i, extent{off, n})
	if i+1 < len(*e) && off+n == (*e)[i+1].off {
		(*e)[i].len += (*e)[i+1].len
		*e = slices.Delete(*e, i+1, i+2)
	}
	if i > 0 && (*e)[i-1].off+(*e)[i-1].len == off {
		(*e)[i-1].len += (*e)[i].len
		*e = slices.Delete(*e, i, i+1)
	}
}

func (e extents) sum() (n int64) {
	for _, x := range e {
		n += x.len
	}
	return n
}

func slotBytes(n uint32) int64 { return (int64(n) + Unit - 1) / Unit * Unit }

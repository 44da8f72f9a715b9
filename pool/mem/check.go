package mem

import "fmt"

// Check walks everything and names the first promise that does not hold. It is slow, and meant for tests.
func (p *Pool) Check() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var used int64
	for ref, e := range p.refs {
		used += e.bytes()
		if e.ref != ref {
			return fmt.Errorf("entry %d is found as %d", e.ref, ref)
		}
		if !e.dropped && p.entries[e.key] != e {
			return fmt.Errorf("entry %d is not found by its key", ref)
		}
		if e.dropped && !e.held() {
			return fmt.Errorf("entry %d is dropped, nobody holds it, and it is still there", ref)
		}
		if (e.place != nil) != (!e.dropped && e.count() == len(e.shards)) {
			return fmt.Errorf("entry %d visible with %d of %d shards", ref, e.count(), len(e.shards))
		}
		if e.parent != nil && (e.parent.dropped || p.refs[e.parent.ref] != e.parent) {
			return fmt.Errorf("suffix kept when its prefix goes: the parent of entry %d is not stored", ref)
		}
	}
	for _, x := range p.free {
		used += x.len
	}
	if used != p.stats.Capacity {
		return fmt.Errorf("%d bytes are used or free, of %d", used, p.stats.Capacity)
	}
	return nil
}

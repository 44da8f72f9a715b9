package mem

import "github.com/kvagent/kvagent/pool"

// Prefix implements pool.Index.
func (p *Pool) Prefix(s pool.SpaceID, group uint8, h pool.Hashes) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	chain := p.prefix(s, group, h)
	p.touch(chain)
	return len(chain)
}

// Exists implements pool.Index.
func (p *Pool) Exists(s pool.SpaceID, group uint8, h pool.Hashes, present []bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range present {
		present[i] = p.visible(s, group, &h, i) != nil
	}
}

// Pin implements pool.Index.
func (p *Pool) Pin(
	s pool.SpaceID, group uint8, h pool.Hashes, maxBytes int64, refs []pool.Ref,
) (int, []pool.Ref, int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	chain := p.prefix(s, group, h)
	var bytes int64
	n := 0
	for _, e := range chain {
		if bytes+e.bytes() > maxBytes {
			break
		}
		bytes += e.bytes()
		e.pins++
		refs = append(refs, e.ref)
		n++
	}
	p.touch(chain[:n])
	return n, refs, bytes
}

// Unpin implements pool.Index.
func (p *Pool) Unpin(refs []pool.Ref) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range refs {
		if e := p.refs[r]; e != nil && e.pins > 0 {
			p.unpin(e)
		}
	}
}

func (p *Pool) unpin(e *entry) {
	e.pins--
	p.settle(e)
}

func (p *Pool) prefix(s pool.SpaceID, group uint8, h pool.Hashes) (chain []*entry) {
	for i := 0; i < h.N; i++ {
		e := p.visible(s, group, &h, i)
		if e == nil {
			break
		}
		chain = append(chain, e)
	}
	return chain
}

func (p *Pool) visible(s pool.SpaceID, group uint8, h *pool.Hashes, i int) *entry {
	if e := p.find(s, group, h.At(i)); e != nil && e.place != nil {
		return e
	}
	return nil
}

func (p *Pool) find(s pool.SpaceID, group uint8, hash []byte) *entry {
	if len(hash) < 1 || len(hash) > pool.MaxHashLen {
		return nil
	}
	return p.entries[entryKey{s, group, pool.MakeHash(hash)}]
}

// touch makes a chain the most recently used, its first entry most of all, and links neighbours
// that have no link.
func (p *Pool) touch(chain []*entry) {
	for i := len(chain) - 1; i >= 0; i-- {
		if chain[i].place != nil {
			p.recent.MoveToFront(chain[i].place)
		}
		if i > 0 {
			link(chain[i], chain[i-1])
		}
	}
}

// link makes child a child of parent, if it has no parent and no cycle results.
func link(child, parent *entry) {
	if child.parent != nil || parent == nil {
		return
	}
	for a := parent; a != nil; a = a.parent {
		if a == child {
			return
		}
	}
	child.parent = parent
	parent.children[child] = struct{}{}
}

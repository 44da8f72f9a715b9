package tier

import (
	"slices"

	"github.com/kvagent/kvagent/pool"
)

// Pin implements pool.Index: pins of entries in memory, followed by promises of entries that tiers
// are believed to have, within the prefetch budget.
func (p *Pool) Pin(
	s pool.SpaceID, group uint8, h pool.Hashes, maxBytes int64, refs []pool.Ref,
) (int, []pool.Ref, int64) {
	n, refs, bytes := p.Memory.Pin(s, group, h, maxBytes, refs)
	if len(p.levels) == 0 {
		return n, refs, bytes
	}
	if p.using && n > 0 {
		p.used(s, group, h.Slice(0, n))
	}
	g := p.spaces.get(s).group(group)
	if n == h.N || g == nil || maxBytes-bytes < g.memory {
		return n, refs, bytes
	}
	w := scratchPool.Get().(*scratch)
	defer scratchPool.Put(w)
	end := p.locate(w, s, group, &h, n)
	for i := n; i < end; {
		if w.where[i-n] != inMemory {
			if maxBytes-bytes < g.memory {
				return i, refs, bytes
			}
			if ref, ok := p.promise(s, group, &h, i, uint8(w.where[i-n])); ok {
				refs, bytes = append(refs, ref), bytes+g.memory
				i++
				continue
			}
			if p.markInMemory(w, s, group, &h, i, w.where[i-n:i-n+1]); w.where[i-n] != inMemory {
				return i, refs, bytes // it has not come meanwhile
			}
		}
		to := runEnd(w.where, i-n, end-n) + n
		got, all, more := p.Memory.Pin(s, group, h.Slice(i, to), maxBytes-bytes, refs)
		refs, bytes = all, bytes+more
		if i += got; i < to {
			return i, refs, bytes // evicted meanwhile, or maxBytes is reached
		}
	}
	return end, refs, bytes
}

// promise makes a promise of entry i of a chain.
func (p *Pool) promise(s pool.SpaceID, group uint8, h *pool.Hashes, i int, number uint8) (pool.Ref, bool) {
	sp := p.spaces.get(s)
	if sp == nil {
		return 0, false // the space was closed meanwhile
	}
	w := &promise{
		origin: origin{
			key: entryKey{s, group, pool.MakeHash(h.At(i))}, parent: parentOf(h, i), sp: sp, era: sp.now.Load(),
		},
		group:  &sp.groups[group],
		first:  number,
		levels: 1 << number,
	}
	if w.era.epoch == 0 || w.era.off {
		return 0, false
	}
	p.addShared(w)
	p.callTestHook()
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.promiseLocked(w)
}

// addShared adds the shared tiers after the first one that are believed to have the entry too.
func (p *Pool) addShared(w *promise) {
	for _, l := range p.levels[w.first+1:] {
		if l.Local || !l.up() {
			continue
		}
		if there, _ := l.exists.get(w.digest(), p.now()); there {
			w.levels |= 1 << l.number
		}
	}
}

// parentOf returns the hash before entry i of a chain, also if that is before the view.
func parentOf(h *pool.Hashes, i int) (parent pool.Hash) {
	step := max(h.Step, 1)
	if at := h.First + (i-1)*step; at >= 0 {
		parent = pool.MakeHash(h.Blob[at*h.Len : (at+1)*h.Len])
	}
	return parent
}

// Unpin implements pool.Index.
func (p *Pool) Unpin(refs []pool.Ref) {
	if slices.ContainsFunc(refs, isPromise) {
		p.unpinPromises(refs, false)
	}
	p.Memory.Unpin(refs) // which ignores promises
}

func isPromise(ref pool.Ref) bool { return ref&promiseBit != 0 }

// waiter is one call of Settle.
type waiter struct {
	left int
	then func()
	over bool
}

// Settle implements pool.Tiers.
func (p *Pool) Settle(refs []pool.Ref, then func()) (cancel func() bool) {
	w := &waiter{then: then}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ref := range refs {
		if ref&promiseBit == 0 {
			continue
		}
		if pr := p.mu.byID[uint64(ref&^promiseBit)]; pr != nil && pr.open() {
			pr.waiters = append(pr.waiters, w)
			w.left++
		}
	}
	if w.left == 0 {
		return nil
	}
	return func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		was := w.over
		w.over = true
		return !was
	}
}

// Fetched implements pool.Tiers.
func (p *Pool) Fetched(refs []pool.Ref) (own, shared int) {
	if !slices.ContainsFunc(refs, isPromise) {
		return 0, 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ref := range refs {
		if ref&promiseBit == 0 {
			continue
		}
		if pr := p.mu.byID[uint64(ref&^promiseBit)]; pr != nil && p.levels[pr.first].Local {
			own++
		} else {
			shared++
		}
	}
	return own, shared
}

// Hint implements pool.Tiers.
func (p *Pool) Hint(refs []pool.Ref) {
	p.unpinPromises(refs, true)
	p.Memory.Unpin(refs)
}

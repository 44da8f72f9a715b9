package tier

import "github.com/kvagent/kvagent/pool"

// waiter is one Settle.
type waiter struct {
	left int
	then func()
	over bool
}

var _ pool.Tiers = (*Pool)(nil)

// Settle implements pool.Tiers.
func (p *Pool) Settle(refs []pool.Ref, then func()) (cancel func() bool) {
	w := &waiter{then: then}
	p.mu.Lock()
	for _, ref := range refs {
		if ref&promiseBit == 0 {
			continue
		}
		if pr := p.mu.byID[uint64(ref&^promiseBit)]; pr != nil && pr.open() {
			pr.waiters = append(pr.waiters, w)
			w.left++
		}
	}
	w.over = w.left == 0
	now := w.over
	p.mu.Unlock()
	if now {
		then()
	}
	return func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		was := w.over
		w.over = true
		return !was
	}
}

// Hint implements pool.Tiers.
func (p *Pool) Hint(refs []pool.Ref) {
	p.giveBack(refs, true)
	p.unpinMemory(refs)
}

package dram

import (
	"encoding/binary"

	"github.com/kvagent/kvagent/pool"
)

var _ pool.Chilling = (*Pool)(nil)

// Coldest implements pool.Chilling: in the first half what the policy would give up next, as far as it can tell, and then the least recently used
// entries, at most lockStride in all. Slots of a certain size may be made of others.
func (p *Pool) Coldest(out []pool.Cold) int {
	out = out[:min(len(out), lockStride)]
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.core.foretold(out[:len(out)/2])
	return n + p.core.stalest(out[n:])
}

// foretold fills out with what the policy would give up next.
func (c *core) foretold(out []pool.Cold) (n int) {
	var all [lockStride / 2]uint32
	for _, e := range all[:c.advisor.next(all[:len(out)])] {
		if c.recs.all[e].is(flagRecent) && c.cold(e, &out[n]) {
			n++
		}
	}
	return n
}

// stalest fills out with the least recently used entries.
func (c *core) stalest(out []pool.Cold) (n int) {
	e := c.recent.oldest
	for looked := 0; e != none && n < len(out) && looked < lockStride; looked, e = looked+1, c.recs.all[e].newer {
		if c.cold(e, &out[n]) {
			n++
		}
	}
	return n
}

// cold names an entry; false: its space is not open, or was reset.
func (c *core) cold(e uint32, out *pool.Cold) bool {
	r := &c.recs.all[e]
	realm := &c.realms[r.ident.realm()]
	id, open := c.byPrint[realm.space.spec.Fingerprint]
	if realm.over || !open {
		return false
	}
	*out = pool.Cold{Space: id, Group: r.ident.group(), Hash: r.hash.bytes(r.ident.hashLen())}
	return true
}

// bytes is the hash of a key, of n bytes.
func (k *key) bytes(n uint8) (h pool.Hash) {
	for i, w := range [...]uint64{k.a, k.b, k.c, k.d} {
		binary.LittleEndian.PutUint64(h.Bytes[8*i:], w)
	}
	h.Len = n
	return h
}

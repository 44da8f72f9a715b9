package dram

import (
	"encoding/binary"

	"github.com/kvagent/kvagent/pool"
)

var _ pool.Chilling = (*Pool)(nil)

// Coldest implements pool.Chilling: the least recently used entries, at most lockStride. What a policy gives up next nobody can tell, it may be any: with one, half of
// them are those that a hand comes to, which goes round through all.
func (p *Pool) Coldest(out []pool.Cold) int {
	out = out[:min(len(out), lockStride)]
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	if p.core.advisor != nil {
		n = p.core.handful(out[:len(out)/2])
	}
	return n + p.core.stalest(out[n:])
}

// handful fills out with the entries that the hand comes to.
func (c *core) handful(out []pool.Cold) (n int) {
	for looked := 0; n < len(out) && looked < lockStride; looked++ {
		if c.round++; c.round >= c.high {
			c.round = none
			continue
		}
		if c.recs.All[c.round].is(flagRecent) && c.cold(c.round, &out[n]) {
			n++
		}
	}
	return n
}

// stalest fills out with the least recently used entries.
func (c *core) stalest(out []pool.Cold) (n int) {
	e := c.recent.oldest
	for looked := 0; e != none && n < len(out) && looked < lockStride; looked, e = looked+1, c.recs.All[e].newer {
		if c.cold(e, &out[n]) {
			n++
		}
	}
	return n
}

// cold names an entry; false: its space is not open, or was reset.
func (c *core) cold(e uint32, out *pool.Cold) bool {
	r := &c.recs.All[e]
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

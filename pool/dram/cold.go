package dram

import (
	"encoding/binary"

	"github.com/kvagent/kvagent/pool"
)

var _ pool.Chilling = (*Pool)(nil)

// Coldest implements pool.Chilling: the least recently used entries, at most lockStride of them. A policy may choose others.
func (p *Pool) Coldest(out []pool.Cold) int {
	out = out[:min(len(out), lockStride)]
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	n := 0
	e := c.recent.oldest
	for looked := 0; e != none && n < len(out) && looked < lockStride; looked, e = looked+1, c.recs.all[e].newer {
		r := &c.recs.all[e]
		realm := &c.realms[r.ident.realm()]
		id, open := c.byPrint[realm.space.spec.Fingerprint]
		if realm.over || !open {
			continue
		}
		out[n] = pool.Cold{Space: id, Group: r.ident.group(), Hash: r.hash.bytes(r.ident.hashLen())}
		n++
	}
	return n
}

// bytes is the hash of a key, of n bytes.
func (k *key) bytes(n uint8) (h pool.Hash) {
	for i, w := range [...]uint64{k.a, k.b, k.c, k.d} {
		binary.LittleEndian.PutUint64(h.Bytes[8*i:], w)
	}
	h.Len = n
	return h
}

package dram

import "github.com/kvagent/kvagent/pool"

// Peek implements pool.Slots.
func (p *Pool) Peek(b *pool.Batch) {
	for from := 0; from < b.Hashes.N; from += lockStride {
		p.peekPart(b, from, min(from+lockStride, b.Hashes.N))
	}
}

func (p *Pool) peekPart(b *pool.Batch, from, to int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := reservation{core: p.core, batch: b}
	refusal := r.open()
	for i := from; i < to; i++ {
		b.Status[i] = refusal
		if refusal != pool.OK {
			continue
		}
		if e := r.find(r.id, b.Hashes.At(i)); e != none {
			b.Status[i] = r.shardStatus(e, b.Shard)
		}
	}
}

// shardStatus says whether a shard is stored or being written; OK if neither.
func (c *core) shardStatus(e uint32, shard uint8) pool.Status {
	l, bit := &c.lives.All[e], uint16(1)<<shard
	switch {
	case l.present&bit != 0:
		return pool.Exists
	case l.writing&bit != 0:
		return pool.InProgress
	}
	return pool.OK
}

package tier

import (
	"github.com/kvagent/kvagent/pagefault"
	"github.com/kvagent/kvagent/pool"
)

// reservation identifies a shard that is being written to memory.
type reservation struct {
	ref   pool.Ref
	shard uint8
}

// origin is an entry that may be written to tiers.
type origin struct {
	key    entryKey
	parent pool.Hash
	sp     *space
	era    *era
}

// maxWriting bounds the recorded shards being written to memory; others are not written on save.
const maxWriting = 1 << 20

// Reserve implements pool.Slots.
func (p *Pool) Reserve(b *pool.Batch) {
	p.Memory.Reserve(b)
	if !p.saving {
		return
	}
	sp := p.spaces.get(b.Space)
	if sp.group(b.Group) == nil {
		return
	}
	era := sp.now.Load()
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range b.Hashes.N {
		if b.Status[i] != pool.OK || len(p.mu.writing) >= maxWriting {
			continue
		}
		o := origin{key: entryKey{b.Space, b.Group, pool.MakeHash(b.Hashes.At(i))}, sp: sp, era: era}
		if i > 0 {
			o.parent = pool.MakeHash(b.Hashes.At(i - 1))
		} else if len(b.Parent) > 0 && len(b.Parent) <= pool.MaxHashLen {
			o.parent = pool.MakeHash(b.Parent)
		}
		p.mu.writing[reservation{b.Slots[i].Ref, b.Slots[i].Shard}] = o
	}
}

// Commit implements pool.Slots.
func (p *Pool) Commit(slots []pool.Slot, epoch uint32, status []pool.Status) {
	if !p.saving {
		p.Memory.Commit(slots, epoch, status)
		return
	}
	saved := p.takeReserved(slots)
	p.Memory.Commit(slots, epoch, status)
	p.offerSaved(saved, status)
}

// takeReserved removes and returns the entries of reservations that end.
func (p *Pool) takeReserved(slots []pool.Slot) []origin {
	out := make([]origin, len(slots))
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range slots {
		r := reservation{slots[i].Ref, slots[i].Shard}
		if o, ok := p.mu.writing[r]; ok {
			out[i] = o
			delete(p.mu.writing, r)
		}
	}
	return out
}

// offerSaved offers entries that are now complete to the tiers that write on save, each once.
func (p *Pool) offerSaved(saved []origin, status []pool.Status) {
	whole := saved[:0]
	seen := make(map[entryKey]*era) // of which another shard was committed in this call
	for i := range saved {
		o := &saved[i]
		if status[i] != pool.OK || o.sp == nil {
			continue
		}
		if o.sp.spec.Shards > 1 {
			if seen[o.key] == o.era {
				continue
			}
			seen[o.key] = o.era
		}
		if p.visible(o) {
			whole = append(whole, *o)
		}
	}
	if len(whole) == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, l := range p.levels {
		for i := range whole {
			if l.Write == OnSave {
				l.queueLocked(whole[i])
			}
		}
	}
}

// visible reports whether all shards of an entry are committed, one of them just now.
func (p *Pool) visible(o *origin) bool { return o.sp.spec.Shards == 1 || p.has(o) }

// has reports whether memory has an entry.
func (p *Pool) has(o *origin) bool {
	var present [1]bool
	hash := pool.Chain(o.key.hash.Bytes[:o.key.hash.Len], int(o.key.hash.Len))
	p.Memory.Exists(o.key.space, o.key.group, hash, present[:])
	return present[0]
}

// reach calls use with the bytes of a slot that the caller holds. It returns false if a page of
// them cannot be read; memory has then retired it.
func (p *Pool) reach(s pool.Slot, use func(b []byte)) bool {
	if pagefault.Guard(p.arena, nil, func() { use(p.arena[s.Off : s.Off+int64(s.Len)]) }) == nil {
		return true
	}
	p.Probe(s)
	return false
}

package peer

import "github.com/kvagent/kvagent/pool"

// stretch is blocks of one group that are asked for together.
type stretch struct {
	group    int // in the request
	from, to int // in the group
}

// next takes the next blocks off the queue, if the window has room for them.
func (f *fetch) next() (b stretch, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.queue) == 0 {
		return b, false
	}
	r := &f.queue[0]
	at := int(r.first)
	for ; at >= f.request.Groups[b.group].Hashes.N; b.group++ {
		at -= f.request.Groups[b.group].Hashes.N
	}
	n := 1 // until the sizes are known
	if size := f.sizes[b.group]; size > 0 {
		n = int(min(max(f.client.cfg.BatchBytes/f.largest[b.group], 1), MaxBatch))
		if room := (f.client.cfg.WindowBytes - f.owed) / size; int64(n) > room {
			if n = int(max(room, 0)); n == 0 && f.parts == 0 {
				n = 1
			}
		}
	} else if f.owed >= f.client.cfg.WindowBytes {
		n = 0
	}
	n = min(n, int(r.count), f.request.Groups[b.group].Hashes.N-at)
	if n == 0 {
		return b, false
	}
	b.from, b.to = at, at+n
	r.first, r.count = r.first+uint32(n), r.count-uint32(n)
	if r.count == 0 {
		f.queue = f.queue[1:]
	}
	return b, true
}

// ask reserves slots for some blocks and asks for what they lack.
func (f *fetch) ask(l *link, b stretch) {
	if f.full(b) {
		return
	}
	parts := f.reserve(b)
	g := &f.request.Groups[b.group]
	var asks []*ask
	for shard := range f.request.Shards {
		a := &ask{fetch: f, get: get{space: f.request.Space, group: g.Group, shard: uint8(shard)}}
		var blob []byte
		for i, p := range parts {
			if p.failed || !p.has[shard] {
				continue
			}
			p.left++
			a.parts, a.result = append(a.parts, p), append(a.result, cancelled)
			a.get.length = p.slots[shard].Len
			blob = append(blob, g.Hashes.At(b.from+i)...)
		}
		if a.get.hashes = pool.Chain(blob, g.Hashes.Len); len(a.parts) > 0 {
			asks = append(asks, a)
		}
	}
	var done []*part
	f.mu.Lock()
	f.parts += len(parts)
	for i, p := range parts {
		if p.left > 0 {
			continue
		}
		p.again = f.delay(p, f.base(b.group)+uint32(b.from+i))
		done = append(done, p)
	}
	for _, a := range asks {
		f.owed += a.bytes()
	}
	f.mu.Unlock()
	f.settle(done)
	pin := len(asks) > 0 && l.reads()
	for _, a := range asks {
		a.id, a.pin = l.id(), pin
		l.leastLoaded().ask(a)
	}
}

// base returns the number of a group's first block in the subscription.
func (f *fetch) base(group int) (n uint32) {
	for i := range group {
		n += uint32(f.request.Groups[i].Hashes.N)
	}
	return n
}

// leastLoaded returns the stream that is owed least.
func (l *link) leastLoaded() *stream {
	best, load := l.streams[0], l.streams[0].load()
	for _, s := range l.streams[1:] {
		if other := s.load(); other < load {
			best, load = s, other
		}
	}
	return best
}

// reserve reserves the shards of some blocks that are not stored here.
func (f *fetch) reserve(b stretch) []*part {
	r, n := f.request, b.to-b.from
	g := &r.Groups[b.group]
	parts := make([]*part, n)
	for i := range parts {
		parts[i] = &part{slots: make([]pool.Slot, r.Shards), has: make([]bool, r.Shards)}
	}
	batch := pool.Batch{
		Space: r.ID, Group: g.Group, Epoch: r.Epoch, Parent: g.Parent, Hashes: g.Hashes.Slice(b.from, b.to),
		Status: make([]pool.Status, n), Slots: make([]pool.Slot, n),
	}
	if b.from > 0 {
		batch.Parent = g.Hashes.At(b.from - 1)
	}
	size, largest := int64(0), int64(0) // a shard of which none is reserved counts as the one before it
	for shard := range r.Shards {
		batch.Shard = uint8(shard)
		f.client.cfg.Slots.Reserve(&batch)
		for i, p := range parts {
			switch batch.Status[i] {
			case pool.OK:
				p.slots[shard], p.has[shard] = batch.Slots[i], true
				largest = max(largest, int64(batch.Slots[i].Len))
			case pool.Exists:
			case pool.InProgress:
				p.busy = true
			default:
				p.failed, p.reason = true, reasonOf(batch.Status[i])
			}
		}
		size += largest
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if size > f.sizes[b.group] {
		f.sizes[b.group], f.largest[b.group] = size, largest
	}
	return parts
}

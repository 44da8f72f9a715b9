package disk

import "github.com/kvagent/kvagent/pool"

// read runs reader i. It reads to memory of its own, so that a read that outlasts its caller writes
// to no caller's bytes.
func (d *dir) read(i int) {
	b := bounce{lent: d.readMemory[i]}
	defer b.free()
	how := d.queue.io(i, commandRead, func() { d.s.count.inThreads.Add(1) })
	for r := range d.reads {
		d.readRun(r, how, &b)
		_ = r.seg.release() // only read
		r.call.finished(1)
	}
}

func (d *dir) readRun(r *run, how ioFunc, b *bounce) {
	defer close(r.done)
	if r.claim.Load() == givenUp {
		return
	}
	p, err := readSpan(r.seg, how, b, r.off, r.end)
	d.countRead(r.end-r.off, err)
	if !r.claim.CompareAndSwap(unclaimed, delivering) {
		return
	}
	for i := range r.parts {
		part := &r.parts[i]
		ok := err == nil && part.deliver(p[part.off()-r.off:], r.seg.nonce)
		part.item.Status = d.judge(part, ok)
	}
}

// runBytes returns the memory that a run of so many bytes of blocks needs at most, in whole units
// of any device.
func runBytes(blocks int64) int64 { return roundUp(headerBytes+blocks, pageBytes) + pageBytes }

// readSpan reads a part of a segment in whole units of the device. The bytes are b's.
func readSpan(g *segment, how ioFunc, b *bounce, off, end int64) ([]byte, error) {
	from := off / g.align * g.align
	p, err := b.atLeast(roundUp(end, g.align) - from)
	if err != nil {
		return nil, err
	}
	if err := g.fill(how, p, from); err != nil {
		return nil, err
	}
	return p[off-from : end-from], nil
}

// deliver copies a block to the caller if the key, the length, the place, and the checksum of the
// copy match.
func (p *part) deliver(record []byte, nonce uint64) bool {
	var h header
	if !h.decode(record, nonce) || h.kind != block || h.key != p.item.Key || h.off != p.off() || h.length != p.length {
		return false
	}
	return copySum(h.key.Seed(h.length), p.item.Data, record[headerBytes:][:h.length]) == h.sum
}

// judge returns the status of a block that was read. A mismatch drops the block if it has not
// moved.
func (d *dir) judge(p *part, ok bool) pool.Status {
	if ok {
		d.s.index.use(p.tag, p.place)
		return pool.OK
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.s.index.removeIf(p.tag, p.place) {
		return lookAgain
	}
	d.uncount(p.place)
	d.s.notes.note(&p.item.Key)
	d.lost.Store(true)
	return pool.Corrupt
}

// countRead detects a directory that cannot be read any more.
func (d *dir) countRead(n int64, err error) {
	if err == nil {
		d.s.count.read.Add(uint64(n))
		d.s.count.reads.Add(1)
		d.badReads.Store(0)
		return
	}
	d.s.count.readErrors.Add(1)
	if d.badReads.Add(1) < failReads {
		return
	}
	d.readable.Store(false)
	d.s.notes.noteAll()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.setState(StateFailed, err)
}

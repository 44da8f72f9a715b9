package disk

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
)

// enoughBytes is the size from which a piece is written concurrently with others before it is full.
// From this size on a device reaches its full rate with concurrent writes.
const enoughBytes = 1 << 20

// write runs writer i. It takes the pieces whose records are all copied, and the current one as
// soon as no other is being written or it has enoughBytes. So a single block is written at once,
// small ones that arrive meanwhile make the next piece, and the end of a batch does not wait for
// its beginning.
func (d *dir) write(i int) {
	how := d.queue.io(d.s.o.ReadDepth+i, commandWrite, func() { d.s.count.inThreads.Add(1) })
	for {
		p := d.nextPiece()
		if p == nil {
			return
		}
		d.finish(p, d.writePiece(p, how))
	}
}

func (d *dir) nextPiece() *piece {
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		i := slices.IndexFunc(d.sealed, func(p *piece) bool { return p.copying == 0 })
		if i >= 0 {
			p := d.sealed[i]
			d.sealed = slices.Delete(d.sealed, i, i+1)
			d.inFlight++
			return p
		}
		if d.cur != nil && d.cur.n >= enoughBytes && d.cur.copying == 0 {
			d.seal()
			continue
		}
		if len(d.sealed) == 0 && d.inFlight == 0 {
			if d.cur != nil && d.cur.n > 0 {
				d.seal()
				continue
			}
			if d.stopping {
				return nil
			}
		}
		d.work.Wait()
	}
}

func (d *dir) writePiece(p *piece, how ioFunc) error {
	d.mu.Lock()
	lost, reason := d.state != StateOK, d.reason
	d.mu.Unlock()
	if lost {
		return reason
	}
	if err := p.seg.put(how, p.mem[:p.n], p.at); err != nil {
		return err
	}
	d.s.count.written.Add(uint64(p.n))
	d.s.count.writes.Add(1)
	if p.sync {
		return d.syncSegment(p.seg)
	}
	return nil
}

// syncSegment syncs a segment's file and, for the first time, its name, so that they survive a
// crash of the machine.
func (d *dir) syncSegment(g *segment) error {
	if err := g.sync(); err != nil || g.named.Load() {
		return err
	}
	if _, err := d.s.o.faults.meet(opSync, d.path, 0, nil); err != nil {
		return fmt.Errorf("disk: sync %s: %w", d.path, err)
	}
	d.mu.Lock()
	fd := d.lockFD // open while pieces are written
	d.mu.Unlock()
	if _, err := retry(func() (int, error) { return 0, unix.Fsync(fd) }); err != nil {
		return fmt.Errorf("disk: sync %s: %w", d.path, err)
	}
	g.named.Store(true)
	return nil
}

// finish makes what was written visible, and wakes those that wait for it.
func (d *dir) finish(p *piece, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range p.recs {
		r.result = d.settle(p, r, err)
	}
	d.inFlight--
	p.seg.pending--
	d.free = append(d.free, p.mem)
	p.mem = nil
	close(p.done)
	if err != nil {
		d.s.count.writeErrors.Add(1)
		d.lost.Store(true) // part of it may be on the disk
		d.setState(stateOf(err), err)
	}
	if p.seg != d.writing {
		d.wakeKeeper()
	}
	d.broadcast()
}

func (d *dir) settle(p *piece, r *record, err error) pool.Status {
	mine := d.pending[r.tag] == r
	if mine {
		delete(d.pending, r.tag)
	}
	if err != nil {
		if r.kind == tombstone {
			d.owe(r.key)
		}
		return pool.Busy
	}
	at := r.off - p.at
	p.seg.headers = append(p.seg.headers, p.mem[at:at+headerBytes]...)
	if r.kind == tombstone {
		p.seg.tombs++
		return pool.OK
	}
	if !mine || r.deleted {
		return pool.OK // it was stored, and deleted right afterwards
	}
	return d.show(p.seg, r)
}

// show adds a written block to the index. With the lock held.
func (d *dir) show(g *segment, r *record) pool.Status {
	uses := r.from.uses / 2
	if r.from.segment != 0 {
		if now, ok := d.s.index.get(r.tag); !ok || !now.same(r.from) {
			return pool.Missing // it was dropped meanwhile
		}
	}
	old, had, err := d.s.index.put(
		r.tag, place{segment: g.handle, at: uint32(r.off / grain), length: r.length, uses: uses},
	)
	if err != nil {
		d.s.count.indexFull.Add(1)
		d.lost.Store(true)
		return pool.Busy
	}
	if had {
		d.uncount(old)
	}
	g.live++
	d.s.notes.note(&r.key)
	return pool.OK
}

// refuse returns the status of a record that is not to be written. With the lock held.
func (d *dir) refuse(r *record) (pool.Status, bool) {
	switch {
	case r.kind == tombstone:
		return d.refuseTombstone(r)
	case r.from.segment != 0:
		return d.refuseAgain(r)
	}
	if _, ok := d.s.index.get(r.tag); ok {
		return pool.Exists, true
	}
	if d.pending[r.tag] != nil {
		return pool.InProgress, true
	}
	if d.state != StateOK {
		d.s.count.putsLost.Add(1)
		return pool.Busy, true
	}
	return 0, false
}

// refuseAgain does as refuse for a block that the eviction of its segment writes again. It never
// waits for a segment, because making one requires eviction.
func (d *dir) refuseAgain(r *record) (pool.Status, bool) {
	if p, ok := d.s.index.get(r.tag); !ok || !p.same(r.from) {
		return pool.Missing, true
	}
	noSegment := d.writing == nil && d.next == nil
	if d.state != StateOK || noSegment {
		return pool.Busy, true
	}
	if d.next == nil && !d.writing.room(int64(d.curBytes()), r.size(), d.s.o.SegmentBytes) {
		return pool.Busy, true
	}
	return 0, false
}

func (d *dir) curBytes() int {
	if d.cur == nil {
		return 0
	}
	return d.cur.n
}

func (d *dir) refuseTombstone(r *record) (pool.Status, bool) {
	if d.state != StateOK {
		r.had = d.forget(r.tag)
		d.s.notes.note(&r.key)
		d.owe(r.key)
		return pool.Busy, true
	}
	if _, stored := d.s.index.get(r.tag); stored || d.pending[r.tag] != nil || d.lost.Load() {
		return 0, false
	}
	return pool.OK, true // neither in memory nor on the disk
}

// owe remembers a delete until the directory is back. With the lock held.
func (d *dir) owe(k pool.Key) {
	d.s.count.deletesOwed.Add(1)
	if len(d.owed) >= maxOwed {
		d.owed, d.owedAll = nil, true
	}
	if !d.owedAll {
		d.owed = append(d.owed, k)
	}
}

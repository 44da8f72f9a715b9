package disk

import (
	"context"
	"fmt"

	"github.com/kvagent/kvagent/pool"
)

// piece is written at once: consecutive records of many calls, in whole pages.
type piece struct {
	mem     []byte
	seg     *segment
	at      int64 // in the segment
	n       int   // bytes reserved in mem
	copying int   // records being copied into it
	sync    bool  // it has tombstones, which must survive a crash of the machine
	recs    []*record
	done    chan struct{} // closed when it was written, or failed
}

// record is one block or tombstone that is to be written.
type record struct {
	header
	tag  tag
	data []byte
	from place // a block written again: the place where it must still be
	item *pool.Item

	// Guarded by the directory's lock; result may be read when piece is nil or done.

	result  pool.Status
	piece   *piece
	deleted bool  // by a later tombstone
	had     place // tombstone: what it removed from the index, if anything
}

// append adds records to pieces, waiting for room, and copies them. Each has a piece or a result
// afterwards; if ctx ends before, the remaining ones have neither.
func (d *dir) append(ctx context.Context, recs []*record) error {
	for {
		n, changed := d.reserve(recs)
		d.fill(recs[:n])
		if recs = recs[n:]; len(recs) == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-d.s.background.Done():
			return fmt.Errorf("disk: %w", pool.ErrClosed)
		}
	}
}

// reserve takes as many records as there is room for now.
func (d *dir) reserve(recs []*record) (n int, changed chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for ; n < len(recs); n++ {
		r := recs[n]
		if status, no := d.refuse(r); no {
			r.result = status
			continue
		}
		p := d.room(int(r.size()), r.from.segment != 0)
		if p == nil {
			break
		}
		d.take(p, r)
	}
	return n, d.changed
}

// room returns the piece with room for size bytes; nil if there is none now. While a segment is
// evicted, only the blocks that it writes again may begin the next segment. With the lock held.
func (d *dir) room(size int, again bool) *piece {
	for {
		if d.cur == nil && !d.newPiece(again) {
			return nil
		}
		if !d.cur.seg.room(int64(d.cur.n), int64(size), d.s.o.SegmentBytes) {
			d.abandon()
			continue
		}
		if d.cur.n+size > len(d.cur.mem) {
			d.seal()
			continue
		}
		return d.cur
	}
}

func (d *dir) newPiece(again bool) bool {
	if d.writing == nil {
		if d.next == nil || (d.evicting && !again) {
			d.wakeKeeper()
			return false
		}
		d.writing, d.next = d.next, nil
		d.wakeKeeper()
	}
	if len(d.free) == 0 {
		return false
	}
	last := len(d.free) - 1
	d.cur = &piece{mem: d.free[last], seg: d.writing, at: d.writing.tail, done: make(chan struct{})}
	d.free = d.free[:last]
	return true
}

// take assigns a record its place. With the lock held.
func (d *dir) take(p *piece, r *record) {
	r.piece, r.off = p, p.at+int64(p.n)
	p.n += int(r.size())
	p.copying++
	p.recs = append(p.recs, r)
	p.seg.records++
	if r.kind == tombstone {
		p.sync = true
		r.had = d.forget(r.tag)
		d.s.notes.note(&r.key)
		return
	}
	d.pending[r.tag] = r
}

// forget removes a key from what is stored and what is being stored. With the lock held.
func (d *dir) forget(t tag) place {
	if r := d.pending[t]; r != nil {
		r.deleted = true
		delete(d.pending, t)
	}
	p, ok := d.s.index.remove(t)
	if ok {
		d.uncount(p)
	}
	return p
}

// uncount subtracts a block from its segment's counts. With the lock held.
func (d *dir) uncount(p place) {
	if g := d.s.handles.get(p.segment); g != nil {
		if g.live--; g.live == 0 {
			d.emptied = true
			d.wakeKeeper()
		}
	}
}

// fill copies records to their places, piece by piece: one is written while the next is filled.
func (d *dir) fill(recs []*record) {
	for len(recs) > 0 {
		p, n := recs[0].piece, 0
		for ; n < len(recs) && recs[n].piece == p; n++ {
			if p != nil {
				recs[n].fill()
			}
		}
		if p != nil {
			d.filled(p, n)
		}
		recs = recs[n:]
	}
}

// fill copies a record to its place, without any lock.
func (r *record) fill() {
	p := r.piece.mem[r.off-r.piece.at:][:r.size()]
	n := headerBytes + len(r.data)
	// The sum is of the copy, so it detects a caller that changes its bytes meanwhile.
	sum := copySum(r.key.Seed(r.length), p[headerBytes:n], r.data)
	clear(p[n:])
	if r.kind == block {
		r.sum = sum
	}
	r.encode(p, r.piece.seg.nonce)
	r.data = nil
}

// filled counts n records as copied.
func (d *dir) filled(p *piece, n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p.copying -= n; p.copying == 0 {
		d.work.Broadcast()
	}
}

// seal passes the current piece to the writers. With the lock held.
func (d *dir) seal() {
	p := d.cur
	if p == nil {
		return
	}
	d.cur = nil
	if p.n == 0 {
		d.free = append(d.free, p.mem)
		return
	}
	end := int(roundUp(int64(p.n), pageBytes))
	clear(p.mem[p.n:end])
	p.n = end
	p.seg.tail += int64(end)
	p.seg.pending++
	d.sealed = append(d.sealed, p)
	d.work.Broadcast()
}

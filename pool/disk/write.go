package disk

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
)

const (
	// enoughBytes is the size from which a write is begun beside others. From this size on a device
	// reaches its full rate with concurrent writes.
	enoughBytes = 1 << 20
	// mostBytes is the size from which a write is not made larger, so that other writers have some.
	mostBytes = 8 << 20
)

// record is one block that is to be written.
type record struct {
	header
	tag  tag
	data []byte // the caller's, until batch.copied
	item *pool.Item
	call *countdown

	// Guarded by the directory's lock.

	result  pool.Status // InProgress while it is in a batch
	queued  bool
	batch   *batch
	deleted bool // while it was to be written
}

// batch is written at once: consecutive records of many calls, in whole pages.
type batch struct {
	seg    *segment
	at     int64 // in the segment
	n      int64 // bytes of records
	recs   []*record
	copied chan struct{} // closed when the records' data is not needed any more
}

// Put stores the items, and waits until they are written. It waits for its turn, not for room on
// the disk: a block is Busy if its directory is not StateOK. A kill leaves whole blocks.
func (s *Store) Put(ctx context.Context, items []pool.Item) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.calls.Done()
	shares := make([][]*record, len(s.dirs))
	for i := range items {
		it := &items[i]
		if it.Status = s.check(it); it.Status != pool.OK {
			continue
		}
		d := s.choose(&it.Key)
		shares[d.number] = append(shares[d.number], &record{
			header: header{
				key: it.Key, parent: it.Parent, length: uint32(len(it.Data)),
				born: uint32(time.Now().Unix()),
			},
			tag: s.tagOf(&it.Key), data: it.Data, item: it,
		})
	}
	err := s.log(ctx, shares)
	for i, recs := range shares {
		s.dirs[i].mu.Lock()
		for _, r := range recs {
			r.item.Status = r.result
		}
		s.dirs[i].mu.Unlock()
	}
	return err
}

// check returns the status of an item as far as it needs no lock.
func (s *Store) check(it *pool.Item) pool.Status {
	if !valid(&it.Key) || len(it.Data) == 0 || it.Parent.Len > pool.MaxHashLen {
		return pool.Invalid
	}
	if int64(len(it.Data)) > int64(s.o.WriteBytes) || recordBytes(len(it.Data)) > int64(s.o.WriteBytes) {
		s.add(tooLarge, 1)
		return pool.Invalid
	}
	return pool.OK
}

// Delete removes keys from the index. A block may be back after a restart.
func (s *Store) Delete(ctx context.Context, keys []pool.Key) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.calls.Done()
	for i := range keys {
		if k := &keys[i]; valid(k) {
			d := s.choose(k)
			d.mu.Lock()
			d.forget(s.tagOf(k))
			d.mu.Unlock()
			s.notes.note(k)
		}
	}
	return nil
}

// log has the directories write records, and waits until all are written. If ctx or the store ends
// before, it gives up those whose write has not begun.
func (s *Store) log(ctx context.Context, shares [][]*record) (err error) {
	n := 0
	for _, recs := range shares {
		n += len(recs)
	}
	call := newCountdown(n)
	for i, recs := range shares {
		s.dirs[i].submit(recs, call)
	}
	select {
	case <-call.done:
		return nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-s.background.Done():
		err = fmt.Errorf("disk: %w", pool.ErrClosed)
	}
	for i, recs := range shares {
		s.dirs[i].giveUp(recs)
	}
	return err
}

// giveUp takes back the records that no writer has, and waits until writers have copied the others.
func (d *dir) giveUp(recs []*record) {
	var begun []*batch
	d.mu.Lock()
	for _, r := range recs {
		if r.queued {
			d.settle(r, pool.Busy)
		} else if r.batch != nil {
			begun = append(begun, r.batch)
		}
	}
	d.queue = slices.DeleteFunc(d.queue, func(r *record) bool { return !r.queued })
	d.mu.Unlock()
	for _, b := range begun {
		<-b.copied
	}
}

// submit queues records to be written.
func (d *dir) submit(recs []*record, call *countdown) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range recs {
		r.call = call
		if status, decided := d.decide(r); decided {
			d.settle(r, status)
			continue
		}
		d.pending[r.tag] = r
		r.queued = true
		d.queue = append(d.queue, r)
		d.queuedBytes += r.size()
	}
	d.work.Broadcast()
}

// decide returns the status of a record that is not to be written. With the lock held.
func (d *dir) decide(r *record) (status pool.Status, decided bool) {
	_, there := d.s.index.get(r.tag)
	switch {
	case there:
		return pool.Exists, true
	case d.pending[r.tag] != nil:
		return pool.InProgress, true
	case d.state != StateOK:
		d.s.add(putsLost, 1)
	}
	return pool.Busy, d.state != StateOK
}

// settle ends a record with its status. With the lock held.
func (d *dir) settle(r *record, status pool.Status) {
	if d.pending[r.tag] == r {
		delete(d.pending, r.tag)
	}
	if r.queued {
		r.queued = false
		d.queuedBytes -= r.size()
	}
	r.result = status
	r.call.finished()
}

// forget removes a key from what is stored and what is being stored. With the lock held.
func (d *dir) forget(t tag) {
	if r := d.pending[t]; r != nil {
		r.deleted = true
		delete(d.pending, t)
	}
	d.s.index.remove(t)
}

// write runs a writer, which has memory of its own. It takes what is queued as soon as no other
// write is in progress or there is enough. So a single block is written at once, small ones that
// arrive meanwhile make the next write, and the end of a large call does not wait for its
// beginning.
func (d *dir) write(memory []byte) {
	for {
		b := d.nextBatch()
		if b == nil {
			return
		}
		d.writeBatch(b, memory)
	}
}

func (d *dir) nextBatch() *batch {
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		if len(d.queue) > 0 && (d.queuedBytes >= enoughBytes || d.inFlight == 0 || d.stopping) {
			if b := d.reserve(); b != nil {
				return b
			}
		}
		if d.stopping {
			return nil
		}
		d.work.Wait()
	}
}

// reserve takes the first records of the queue as a batch, as many as there is room for; nil if
// there is none now. With the lock held.
func (d *dir) reserve() *batch {
	b := &batch{copied: make(chan struct{})}
	for _, r := range d.queue {
		size := r.size()
		if b.n >= mostBytes || b.n+size > int64(d.s.o.WriteBytes) || !d.room(b, size) {
			break
		}
		r.off, r.batch = b.at+b.n, b
		b.n += size
		b.seg.records++
		r.queued, r.result = false, pool.InProgress
		d.queuedBytes -= size
		b.recs = append(b.recs, r)
	}
	if b.n == 0 {
		return nil
	}
	d.queue = slices.Delete(d.queue, 0, len(b.recs))
	b.seg.tail += roundUp(b.n, pageBytes)
	b.seg.pending++
	d.inFlight++
	return b
}

// room reports whether a further record fits in the segment of a batch, which it chooses for the
// first one. With the lock held.
func (d *dir) room(b *batch, size int64) bool {
	if b.seg != nil {
		return b.seg.room(b.n, size, d.s.o.SegmentBytes)
	}
	if d.writing != nil && !d.writing.room(0, size, d.s.o.SegmentBytes) {
		d.end(d.writing)
	}
	if d.writing == nil {
		d.wakeKeeper()
		if d.next == nil {
			return false
		}
		d.writing, d.next = d.next, nil
	}
	b.seg, b.at = d.writing, d.writing.tail
	return true
}

// writeBatch copies a batch to memory, writes it, makes it visible, and wakes the calls that wait.
func (d *dir) writeBatch(b *batch, memory []byte) {
	for _, r := range b.recs {
		r.fill(memory[r.off-b.at:], b.seg.nonce)
	}
	close(b.copied)
	p := memory[:roundUp(b.n, pageBytes)]
	clear(p[b.n:])
	err := d.writePages(b, p)
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range b.recs {
		if err != nil {
			d.settle(r, pool.Busy)
			continue
		}
		b.seg.headers = append(b.seg.headers, p[r.off-b.at:][:headerBytes]...)
		d.settle(r, d.show(b.seg, r))
	}
	d.inFlight--
	b.seg.pending--
	if err != nil {
		d.s.add(writeErrors, 1)
		d.setState(stateOf(err), err)
	}
	if b.seg != d.writing {
		d.wakeKeeper()
	}
	d.work.Broadcast()
}

func (r *record) fill(p []byte, nonce uint64) {
	n := headerBytes + len(r.data)
	// The sum is of the copy, so it detects a caller that changes its bytes meanwhile.
	r.sum = copySum(r.key.Seed(r.length), p[headerBytes:n], r.data)
	clear(p[n:r.size()])
	r.encode(p, nonce)
	r.data = nil
}

func (d *dir) writePages(b *batch, p []byte) error {
	d.mu.Lock()
	lost, reason := d.state != StateOK, d.reason
	d.mu.Unlock()
	if lost {
		return reason
	}
	if err := b.seg.writeAt(p, b.at); err != nil {
		return err
	}
	d.s.add(writtenBytes, len(p))
	return nil
}

// show makes a written record visible, and returns its status. With the lock held.
func (d *dir) show(g *segment, r *record) pool.Status {
	if r.deleted {
		return pool.OK // it was stored, and deleted right afterwards
	}
	at := place{segment: g.handle, at: uint32(r.off / grain), length: r.length}
	if err := d.s.index.put(r.tag, at); err != nil {
		d.s.add(indexFull, 1)
		return pool.Busy
	}
	d.s.notes.note(&r.key)
	return pool.OK
}

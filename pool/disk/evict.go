package disk

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// makeRoom evicts until one more segment is within the limit. It returns false if the oldest cannot
// be evicted yet because its last piece is still to be written.
func (d *dir) makeRoom() bool {
	for {
		d.mu.Lock()
		fits := d.taken+d.s.o.SegmentBytes <= d.limit && len(d.segments) < d.maxSegments()
		d.mu.Unlock()
		if fits {
			return true
		}
		if !d.evictOldest() {
			return false
		}
	}
}

// maxSegments bounds the files of a log with many deleted blocks.
func (d *dir) maxSegments() int {
	return int(min(2*d.limit/d.s.o.SegmentBytes+8, 2*MaxSegments))
}

// evictOldest writes worthwhile blocks of the oldest segment again, and drops the rest. It returns
// false if the segment is not closed yet. Only the keeper calls it.
func (d *dir) evictOldest() bool {
	d.mu.Lock()
	if len(d.segments) == 0 || !d.segments[0].closed {
		d.mu.Unlock()
		return false
	}
	g, sparse := d.segments[0], d.taken+d.s.o.SegmentBytes <= d.limit
	d.evicting = true
	d.mu.Unlock()
	d.evict(g, sparse)
	d.mu.Lock()
	d.evicting = false
	d.broadcast()
	d.mu.Unlock()
	return true
}

// takenOfOldest returns the bytes on disk of the segment that evictOldest takes.
func (d *dir) takenOfOldest() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.segments) == 0 {
		return 0
	}
	return d.segments[0].taken
}

func (d *dir) evict(g *segment, sparse bool) {
	var b bounce
	defer b.free()
	c, err := readSegment(g, &b)
	if err != nil {
		d.s.count.readErrors.Add(1)
		d.lost.Store(true)
		d.s.count.evicted.Add(uint64(d.s.index.removeSegments(map[uint32]bool{g.handle: true})))
		d.s.notes.noteAll()
	} else {
		d.writeAgain(g, c.headers, sparse, &b)
		d.forgetAll(g, c.headers)
	}
	d.drop(g)
}

// writeAgain appends the blocks that were read since they were written, or all blocks of a sparse
// segment, which is evicted for its file only. It appends at most half a segment, so that evicting
// always makes room; the most read blocks come first.
func (d *dir) writeAgain(g *segment, headers []byte, sparse bool, b *bounce) {
	var again []*record
	for p := headers; len(p) > 0; p = p[headerBytes:] {
		var h header
		if !h.decode(p, g.nonce) || h.kind != block {
			continue
		}
		t := d.s.tagOf(&h.key)
		at, ok := d.s.index.get(t)
		if ok && at.segment == g.handle && at.off() == h.off && (sparse || at.uses > 0) {
			again = append(again, &record{header: h, tag: t, from: at})
		}
	}
	slices.SortStableFunc(again, func(a, b *record) int { return cmp.Compare(b.from.uses, a.from.uses) })
	var left = d.s.o.SegmentBytes / 2
	var written []*record
	for _, r := range again {
		if left -= r.size(); left < 0 || !d.oneAgain(g, r, b) {
			break
		}
		written = append(written, r)
	}
	for _, r := range written {
		if r.piece != nil {
			<-r.piece.done
		}
	}
}

// oneAgain returns false if there is no room for more.
func (d *dir) oneAgain(g *segment, r *record, b *bounce) bool {
	off := r.off
	p, err := readSpan(g, pread, b, off, off+r.size())
	var h header
	if err != nil || !h.decode(p, g.nonce) || h != r.header {
		return true // damaged: it is dropped with the segment
	}
	if r.data = p[headerBytes:][:h.length]; sumOf(&h, r.data) != h.sum {
		return true
	}
	if d.append(context.Background(), []*record{r}) != nil || r.piece == nil {
		return false
	}
	d.s.count.again.Add(1)
	d.s.count.againBytes.Add(uint64(h.length))
	return true
}

// forgetAll removes from the index what remains of a segment.
func (d *dir) forgetAll(g *segment, headers []byte) {
	for p := headers; len(p) > 0; p = p[headerBytes:] {
		var h header
		if h.decode(p, g.nonce) && h.kind == block &&
			d.s.index.removeIf(d.s.tagOf(&h.key), place{segment: g.handle, at: uint32(h.off / grain)}) {
			d.s.count.evicted.Add(1)
			d.s.notes.note(&h.key)
		}
	}
}

// drop unlinks a segment; its file is closed after the last read.
func (d *dir) drop(g *segment) {
	_, err := d.s.o.faults.meet(opUnlink, g.path, 0, nil)
	if err == nil {
		err = os.Remove(g.path)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.s.handles.drop(g)
	d.segments = slices.DeleteFunc(d.segments, func(other *segment) bool { return other == g })
	d.taken -= g.taken
	d.s.count.segmentsDropped.Add(1)
	if err = errors.Join(err, g.release()); err != nil && !errors.Is(err, unix.ENOENT) {
		d.setState(stateOf(err), err)
	}
}

// dropEmpty drops segments without blocks. One with tombstones stays until it is the oldest: they
// delete earlier records.
func (d *dir) dropEmpty() {
	for {
		g := d.empty()
		if g == nil {
			return
		}
		d.drop(g)
	}
}

func (d *dir) empty() *segment {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.emptied || d.state != StateOK {
		return nil
	}
	for i, g := range d.segments {
		if g.closed && g.live == 0 && (g.tombs == 0 || i == 0) {
			return g
		}
	}
	d.emptied = false
	return nil
}

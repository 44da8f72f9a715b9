package disk

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// keep runs the keeper, which does all work on whole segments and whole directories.
func (d *dir) keep() {
	for {
		d.notify()
		d.closeEnded()
		d.prepare()
		timer := time.NewTimer(d.probe())
		select {
		case <-d.wake:
		case <-timer.C:
		case <-d.s.background.Done():
			timer.Stop()
			return
		}
		timer.Stop()
	}
}

// prepare makes the next segment.
func (d *dir) prepare() {
	d.mu.Lock()
	needed := d.opened && d.state == StateOK && d.next == nil
	d.mu.Unlock()
	if !needed || !d.makeRoom() {
		return
	}
	g, err := d.create()
	// Another program uses the disk too, so the cache shrinks. A closed segment may take less than
	// the new one needs, so it gives up several.
	for range MinSegments {
		if stateOf(err) != StateFull || !d.evictOldest() {
			break
		}
		g, err = d.create()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err != nil {
		d.setState(stateOf(err), err)
		return
	}
	d.adopt(g)
}

// adopt makes a fresh segment the next one. With the lock held.
func (d *dir) adopt(g *segment) {
	d.s.handles.add(g)
	d.segments = append(d.segments, g)
	d.next = g
	d.taken += g.taken
	d.wakeKeeper() // which may have to tell of it
	d.work.Broadcast()
}

// create makes a file with all its space. Only the keeper calls it.
func (d *dir) create() (*segment, error) {
	d.mu.Lock()
	d.lastID++
	g := &segment{id: d.lastID, taken: d.s.o.SegmentBytes}
	d.mu.Unlock()
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	g.nonce = binary.LittleEndian.Uint64(b[:])
	path := filepath.Join(d.path, segmentName(g.id, g.nonce))
	f, err := openFile(path, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, d.s.o.faults)
	if err != nil {
		return nil, err
	}
	g.file = f
	g.refs.Store(1)
	if err := f.allocate(d.s.o.SegmentBytes); err != nil {
		return nil, errors.Join(err, os.Remove(path), f.close())
	}
	return g, nil
}

// closeEnded writes the footers of segments whose last batch is written.
func (d *dir) closeEnded() {
	for {
		g := d.toClose()
		if g == nil {
			return
		}
		err := d.writeFooter(g)
		_, taken, statErr := g.size()
		d.mu.Lock()
		if statErr == nil {
			d.taken += taken - g.taken
			g.taken = taken
		}
		g.closed, g.headers = true, nil
		if err != nil {
			d.s.add(writeErrors, 1)
			d.setState(stateOf(err), err) // without a footer, it is scanned at recovery
		}
		d.mu.Unlock()
	}
}

func (d *dir) toClose() *segment {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, g := range d.ended {
		if g.pending == 0 {
			d.ended = append(d.ended[:i], d.ended[i+1:]...)
			return g
		}
	}
	return nil
}

// makeRoom evicts until one more segment is within the limit. It returns false if the oldest cannot
// be evicted yet because its last batch is still to be written.
func (d *dir) makeRoom() bool {
	for {
		d.mu.Lock()
		most := min(2*d.limit/d.s.o.SegmentBytes+8, 2*MaxSegments) // files, of which many may be short
		fits := d.taken+d.s.o.SegmentBytes <= d.limit && int64(len(d.segments)) < most
		d.mu.Unlock()
		if fits {
			return true
		}
		if !d.evictOldest() {
			return false
		}
	}
}

// evictOldest drops the oldest segment. It returns false if that is not closed yet. Only the keeper
// calls it.
func (d *dir) evictOldest() bool {
	d.mu.Lock()
	if len(d.segments) == 0 || !d.segments[0].closed {
		d.mu.Unlock()
		return false
	}
	g := d.segments[0]
	d.mu.Unlock()
	var b bounce
	defer b.free()
	c, err := readSegment(g, &b)
	if err != nil {
		d.s.add(readErrors, 1)
	}
	if err != nil || !c.footer { // a scan finds only what verifies
		d.s.add(evicted, d.s.index.removeSegments(map[uint32]bool{g.handle: true}))
		d.s.notes.noteAll()
	} else {
		d.forgetAll(g, c.headers)
	}
	d.drop(g)
	return true
}

// forgetAll removes from the index what remains of a segment.
func (d *dir) forgetAll(g *segment, headers []byte) {
	for p := headers; len(p) > 0; p = p[headerBytes:] {
		var h header
		if h.decode(p, g.nonce) &&
			d.s.index.removeIf(d.s.tagOf(&h.key), place{segment: g.handle, at: uint32(h.off / grain)}) {
			d.s.add(evicted, 1)
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
	d.s.handles.all.Delete(g.handle)
	d.segments = slices.DeleteFunc(d.segments, func(other *segment) bool { return other == g })
	d.taken -= g.taken
	if err = errors.Join(err, g.release()); err != nil && !errors.Is(err, unix.ENOENT) {
		d.setState(stateOf(err), err)
	}
}

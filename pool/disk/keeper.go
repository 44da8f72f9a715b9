package disk

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// keep runs the keeper, which does all work on whole segments and whole directories.
func (d *dir) keep() {
	for {
		d.notify()
		d.closeEnded()
		d.dropEmpty()
		d.prepare()
		d.payOwed()
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

// prepare makes the next segment, and then room for the one after it: evicting needs a segment to
// write to.
func (d *dir) prepare() {
	d.mu.Lock()
	able, needed := d.opened && d.state == StateOK, d.next == nil
	d.mu.Unlock()
	if able && needed {
		d.makeNext()
	}
	if able {
		d.makeRoom()
	}
}

func (d *dir) makeNext() {
	if !d.makeRoom() {
		return
	}
	g, err := d.create()
	// Another program uses the disk too, so the cache shrinks. A closed segment may take less than
	// the new one needs, so it gives up as many as make room for one.
	for given := int64(0); stateOf(err) == StateFull && given < d.s.o.SegmentBytes; g, err = d.create() {
		taken := d.takenOfOldest()
		if !d.evictOldest() {
			break
		}
		given += taken
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
	d.notifyBuffered()
	d.broadcast()
}

// create makes a file with all its space. Only the keeper calls it.
func (d *dir) create() (*segment, error) {
	d.mu.Lock()
	d.lastID++
	g := &segment{id: d.lastID, taken: d.s.o.SegmentBytes}
	d.mu.Unlock()
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return nil, err
	}
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

// closeEnded writes the footers of segments whose last piece is written.
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
		if d.emptied = d.emptied || g.live == 0; err != nil {
			d.s.count.writeErrors.Add(1)
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

// payOwed writes the tombstones of blocks that were deleted while nothing could be written.
func (d *dir) payOwed() {
	d.mu.Lock()
	if d.state != StateOK || (len(d.owed) == 0 && !d.owedAll) {
		d.mu.Unlock()
		return
	}
	owed, all := d.owed, d.owedAll
	d.owed, d.owedAll = nil, false
	d.lost.Store(true) // so that each gets its tombstone
	d.mu.Unlock()
	if all {
		for d.evictOldest() {
		}
		return
	}
	recs := make([]*record, len(owed))
	for i := range owed {
		recs[i] = d.s.tombstone(&owed[i])
	}
	// Those that get no room now remain owed.
	ctx, cancel := context.WithTimeout(d.s.background, 100*time.Millisecond)
	defer cancel()
	if err := d.append(ctx, recs); err != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, r := range recs {
			if r.piece == nil {
				d.owe(r.key)
			}
		}
	}
}

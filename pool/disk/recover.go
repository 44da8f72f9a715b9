package disk

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// recoverAhead is the number of segments that are read ahead of the index.
const recoverAhead = 4

// open locks the directory and recovers its log. The result is in its state.
func (d *dir) open() error {
	err := d.lock()
	if err == nil {
		err = d.recover()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err != nil {
		if errors.Is(d.reason, errNotOpened) {
			d.state = StateOK // so that the first failure is a change
		}
		d.setState(stateOf(err), err)
		d.reason = err
		return err
	}
	d.opened = true
	d.lost.Store(false)
	d.readable.Store(true)
	d.s.notes.noteAll()
	d.badReads.Store(0)
	d.setState(StateOK, nil)
	d.notifyBuffered()
	return nil
}

// recover reads footers, scans segments without one, and applies both in the order of the log.
func (d *dir) recover() error {
	segments, err := d.openSegments()
	if err != nil {
		return err
	}
	type found struct {
		contents
		err error
	}
	results := make([]chan found, len(segments))
	for i := range results {
		results[i] = make(chan found, 1)
	}
	places := make(chan struct{}, recoverAhead)
	go func() { // ends when all results are taken, below
		for i, g := range segments {
			places <- struct{}{}
			go func() {
				var b bounce
				defer b.free()
				c, err := readSegment(g, &b)
				results[i] <- found{c, err}
			}()
		}
	}()
	for i, g := range segments {
		f := <-results[i]
		<-places
		d.apply(g, &f.contents, f.err)
	}
	return nil
}

// openSegments opens the files of the log, oldest first.
func (d *dir) openSegments() (segments []*segment, err error) {
	files, err := os.ReadDir(d.path)
	if err != nil {
		return nil, fmt.Errorf("disk: list %s: %w", d.path, err)
	}
	for _, f := range files {
		version, id, nonce, ok := parseName(f.Name())
		if !ok {
			continue
		}
		if version > formatVersion {
			return nil, fmt.Errorf(
				"disk: %s has format %d, this program reads up to %d: %w", filepath.Join(d.path, f.Name()), version,
				formatVersion, errFormat,
			)
		}
		segments = append(segments, &segment{file: &file{path: filepath.Join(d.path, f.Name())}, id: id, nonce: nonce})
	}
	slices.SortFunc(segments, func(a, b *segment) int { return cmp.Compare(a.id, b.id) })
	kept := segments[:0]
	for _, g := range segments {
		d.lastID = max(d.lastID, g.id)
		f, err := openFile(g.path, unix.O_RDWR, d.s.o.faults)
		if errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) {
			if f, err = openFile(g.path, unix.O_RDONLY, d.s.o.faults); err == nil {
				f.readOnly = true
			}
		}
		if err != nil {
			d.s.count.readErrors.Add(1)
			d.lost.Store(true)
			continue // only its blocks are missing
		}
		g.file = f
		g.refs.Store(1)
		kept = append(kept, g)
	}
	return kept, nil
}

// apply adds a segment's records to the index; later records of the log replace earlier ones.
func (d *dir) apply(g *segment, c *contents, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.s.handles.add(g)
	_, g.taken, _ = g.size() // 0 if that fails too
	d.segments = append(d.segments, g)
	d.taken += g.taken
	d.s.count.damaged.Add(uint64(c.damaged))
	d.s.count.recoveryRead.Add(uint64(c.read))
	if g.closed = true; err != nil {
		d.s.count.readErrors.Add(1)
		d.emptied = true
		return
	}
	for p := c.headers; len(p) > 0; p = p[headerBytes:] {
		var h header
		if h.decode(p, g.nonce) {
			d.applyOne(g, &h)
		}
	}
	if g.live == 0 {
		d.emptied = true
	}
	if !c.footer {
		d.s.count.scanned.Add(1)
		g.closed, g.headers, g.tail = false, c.headers, c.end
		d.ended = append(d.ended, g)
	}
}

func (d *dir) applyOne(g *segment, h *header) {
	if d.s.choose(&h.key) != d {
		return // the directories are not the same as before
	}
	t := d.s.tagOf(&h.key)
	if h.kind == tombstone {
		g.tombs++
		if p, ok := d.s.index.remove(t); ok {
			d.uncount(p)
		}
		return
	}
	old, had, err := d.s.index.put(t, place{segment: g.handle, at: uint32(h.off / grain), length: h.length})
	if err != nil {
		d.s.count.indexFull.Add(1)
		return
	}
	if had {
		d.uncount(old)
	}
	g.live++
	d.s.count.recovered.Add(1)
}

// detach closes everything and drops what is stored here.
func (d *dir) detach() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var err error
	mine := map[uint32]bool{}
	for _, g := range d.segments {
		mine[g.handle] = true
		d.s.handles.drop(g)
		err = errors.Join(err, g.release())
	}
	if len(mine) > 0 {
		d.s.index.removeSegments(mine)
	}
	d.segments, d.ended, d.writing, d.next, d.taken, d.opened = nil, nil, nil, nil, 0, false
	d.readable.Store(false)
	d.s.notes.noteAll()
	if d.lockFD >= 0 {
		err = errors.Join(err, unix.Close(d.lockFD))
		d.lockFD = -1
	}
	return err
}

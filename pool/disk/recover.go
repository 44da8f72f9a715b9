package disk

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
)

// open locks the directory and recovers its log. The result is in its state.
func (d *dir) open() error {
	err := d.lock()
	if err == nil {
		err = d.recover()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err != nil {
		d.setState(stateOf(err), err)
		d.reason = err
		return err
	}
	d.opened = true
	d.works()
	return nil
}

// works records that the directory can be read and written. With the lock held.
func (d *dir) works() {
	d.badReads.Store(0)
	d.readable.Store(true)
	d.s.notes.noteAll()
	d.setState(StateOK, nil)
}

// recover reads footers, scans segments without one, and applies both in the order of the log.
func (d *dir) recover() error {
	segments, err := d.openSegments()
	if err != nil {
		return err
	}
	var b bounce
	defer b.free()
	for _, g := range segments {
		c, err := readSegment(g, &b)
		d.apply(g, &c, err)
	}
	return nil
}

// openSegments opens the files of the log, oldest first. One that cannot be opened takes room until
// it is evicted: only its blocks are missing.
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
		segments = append(segments, &segment{
			file: &file{fd: -1, path: filepath.Join(d.path, f.Name()), faults: d.s.o.faults}, id: id, nonce: nonce,
		})
	}
	slices.SortFunc(segments, func(a, b *segment) int { return cmp.Compare(a.id, b.id) })
	for _, g := range segments {
		d.lastID = max(d.lastID, g.id)
		f, err := openFile(g.path, unix.O_RDWR, d.s.o.faults)
		if errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) {
			if f, err = openFile(g.path, unix.O_RDONLY, d.s.o.faults); err == nil {
				f.readOnly = true
			}
		}
		if err == nil {
			g.file = f
		} else if info, err := os.Lstat(g.path); err == nil {
			g.taken = info.Size() // about
		}
		g.refs.Store(1)
	}
	return segments, nil
}

// apply adds a segment's records to the index; later records of the log replace earlier ones.
func (d *dir) apply(g *segment, c *contents, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.s.handles.add(g)
	if _, taken, err := g.size(); err == nil {
		g.taken = taken
	}
	d.segments = append(d.segments, g)
	d.taken += g.taken
	d.s.add(damaged, c.damaged)
	if g.closed = true; err != nil {
		d.s.add(readErrors, 1)
		return
	}
	for p := c.headers; len(p) > 0; p = p[headerBytes:] {
		var h header
		if h.decode(p, g.nonce) {
			d.applyOne(g, &h)
		}
	}
	if !c.footer {
		d.s.add(scanned, 1)
		g.closed, g.headers, g.tail = false, c.headers, c.end
		d.ended = append(d.ended, g)
	}
}

func (d *dir) applyOne(g *segment, h *header) {
	if d.s.choose(&h.key) != d {
		return // the directories are not the same as before
	}
	t := d.s.tagOf(&h.key)
	if d.s.index.put(t, place{segment: g.handle, at: uint32(h.off / grain), length: h.length}) != nil {
		d.s.add(indexFull, 1)
		return
	}
	d.s.add(recovered, 1)
}

// detach closes everything and drops what is stored here.
func (d *dir) detach() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var err error
	mine := map[uint32]bool{}
	for _, g := range d.segments {
		mine[g.handle] = true
		d.s.handles.all.Delete(g.handle)
		err = errors.Join(err, g.release())
	}
	d.s.index.removeSegments(mine)
	d.segments, d.ended, d.writing, d.next, d.taken, d.opened = nil, nil, nil, nil, 0, false
	d.readable.Store(false)
	d.s.notes.noteAll()
	if d.lockFD >= 0 {
		err = errors.Join(err, unix.Close(d.lockFD))
		d.lockFD = -1
	}
	return err
}

// lock opens the directory, which it makes if its parent is there, and locks it.
func (d *dir) lock() error {
	fd, err := openDir(d.path)
	if errors.Is(err, unix.ENOENT) {
		if err = os.Mkdir(d.path, 0o700); err == nil {
			fd, err = openDir(d.path)
		}
	}
	if err != nil {
		return fmt.Errorf("disk: open directory %s: %w", d.path, err)
	}
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		err = errors.Join(err, unix.Close(fd))
		if errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("disk: %s: %w", d.path, ErrLocked)
		}
		return fmt.Errorf("disk: lock %s: %w", d.path, err)
	}
	d.mu.Lock()
	d.lockFD = fd
	d.mu.Unlock()
	return nil
}

func openDir(path string) (int, error) {
	return retry(func() (int, error) { return unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0) })
}

// contents is what recovery found in a segment.
type contents struct {
	headers []byte // of whole records, in their order
	end     int64  // end of the last of them, in whole pages
	footer  bool   // it was closed
	damaged int    // records whose header matches and whose bytes do not
}

// readSegment reads the footer, or scans the segment.
func readSegment(g *segment, b *bounce) (c contents, err error) {
	size, _, err := g.size()
	if err != nil {
		return c, err
	}
	if c, ok := readFooter(g, b, size); ok {
		return c, nil
	}
	return scan(g, b, size)
}

func readFooter(g *segment, b *bounce, size int64) (c contents, ok bool) {
	if size < pageBytes || size%pageBytes != 0 {
		return c, false
	}
	p, err := b.atLeast(pageBytes)
	if err != nil || g.readAt(p, size-pageBytes) != nil {
		return c, false
	}
	var t trailer
	if !t.decode(p[pageBytes-trailerBytes:], g.nonce, size) {
		return c, false
	}
	if p, err = b.atLeast(size - t.headers); err != nil || g.readAt(p, t.headers) != nil {
		return c, false
	}
	headers := p[:int64(t.count)*headerBytes]
	if pool.Sum(0, headers) != t.sum {
		return c, false
	}
	return contents{headers: bytes.Clone(headers), end: t.headers, footer: true}, true
}

// scan tries every place where a record could begin, and keeps those that verify. It skips what is
// torn, damaged or was never written. Bytes of a block are not taken for a record, because they
// lack the nonce.
func scan(g *segment, b *bounce, size int64) (c contents, err error) {
	w := window{g: g, b: b, size: size / pageBytes * pageBytes}
	for pos := int64(0); pos+headerBytes <= w.size; {
		p, err := w.at(pos, headerBytes)
		if err != nil {
			return c, err
		}
		var h header
		if !h.decode(p, g.nonce) || h.off != pos || pos+h.size() > w.size {
			pos += grain
			continue
		}
		if p, err = w.at(pos, headerBytes+int64(h.length)); err != nil {
			return c, err
		}
		if pool.Sum(h.key.Seed(h.length), p[headerBytes:]) == h.sum {
			c.headers = append(c.headers, p[:headerBytes]...)
			c.end = roundUp(pos+h.size(), pageBytes)
		} else {
			c.damaged++
		}
		pos += h.size()
	}
	return c, nil
}

// window is the part of a segment that is in memory during a scan.
type window struct {
	g    *segment
	b    *bounce
	size int64
	off  int64
	p    []byte
}

const windowBytes = 4 << 20

// at returns n bytes at off, valid until the next call.
func (w *window) at(off, n int64) ([]byte, error) {
	if off < w.off || off+n > w.off+int64(len(w.p)) {
		from := off / pageBytes * pageBytes
		end := min(w.size, max(from+windowBytes, roundUp(off+n, pageBytes)))
		p, err := w.b.atLeast(end - from)
		if err != nil {
			return nil, err
		}
		w.off, w.p = from, p
		if err := w.g.readAt(p, from); err != nil {
			w.p = nil
			return nil, fmt.Errorf("scan: %w", err)
		}
	}
	return w.p[off-w.off:][:n], nil
}

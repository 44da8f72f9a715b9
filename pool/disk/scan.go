package disk

import (
	"fmt"

	"github.com/kvagent/kvagent/pool"
)

// contents is what recovery found in a segment.
type contents struct {
	headers []byte // of whole records, in their order
	end     int64  // end of the last of them, in whole pages
	footer  bool   // it was closed
	damaged int    // records whose header matches and whose bytes do not
	read    int64  // bytes
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
	return contents{
		headers: append([]byte(nil), headers...), end: t.headers, footer: true, read: size - t.headers,
	}, true
}

// scan tries every place where a record could begin, and keeps those that verify. It skips what is
// torn, damaged or was never written. Bytes of a block are not taken for a record, because they
// lack the nonce.
func scan(g *segment, b *bounce, size int64) (c contents, err error) {
	w := window{g: g, b: b, size: size / pageBytes * pageBytes}
	for pos := g.nextData(0); pos+headerBytes <= w.size; {
		p, err := w.at(pos, headerBytes)
		if err != nil {
			return c, err
		}
		var h header
		if !h.decode(p, g.nonce) || h.off != pos || pos+h.size() > w.size {
			pos = g.nextData(pos + grain)
			continue
		}
		if p, err = w.at(pos, headerBytes+int64(h.length)); err != nil {
			return c, err
		}
		if h.kind == tombstone || pool.Sum(h.key.Seed(h.length), p[headerBytes:]) == h.sum {
			c.headers = append(c.headers, p[:headerBytes]...)
			c.end = roundUp(pos+h.size(), pageBytes)
		} else {
			c.damaged++
		}
		pos += h.size()
	}
	c.read = w.size
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

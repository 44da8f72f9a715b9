package disk

import (
	"bytes"
	"encoding/binary"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvagent/kvagent/pool"
)

// segment is one file of a log.
type segment struct {
	*file
	id, nonce uint64
	handle    uint32 // in the index, from 1; not reused in this process

	refs atomic.Int32 // one of the log, and one for each read; the last one closes the file

	// The fields below are guarded by the directory's lock.

	taken   int64  // bytes on the disk, as counted against the limit
	tail    int64  // an open segment: where the next batch begins
	records int    // an open segment: reserved in it, whose headers will be in the footer
	headers []byte // an open segment: of the records written, in any order
	pending int    // batches not yet written
	closed  bool   // it has a footer, or will never have one
}

// hold keeps the file open for a read; false if it is closed already.
func (g *segment) hold() bool {
	for {
		n := g.refs.Load()
		if n == 0 {
			return false
		}
		if g.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (g *segment) release() error {
	if g.refs.Add(-1) == 0 {
		return g.close()
	}
	return nil
}

// room reports whether a further record of size bytes, in a batch that begins at tail and has used
// bytes so far, leaves room for the footer.
func (g *segment) room(used, size, limit int64) bool {
	return g.tail+roundUp(used+size, pageBytes)+footerBytes(g.records+1) <= limit
}

// handles finds segments by their numbers in the index, for all directories together.
type handles struct {
	last atomic.Uint32
	all  sync.Map // handle to *segment
}

func (h *handles) add(g *segment) {
	g.handle = h.last.Add(1)
	h.all.Store(g.handle, g)
}

// hold returns a segment with its file held open, or nil.
func (h *handles) hold(handle uint32) *segment {
	if g, ok := h.all.Load(handle); ok && g.(*segment).hold() {
		return g.(*segment)
	}
	return nil
}

// writeFooter ends a segment's file: copies of its headers in the order of the log, and the
// trailer. Only the keeper calls it, or Close after it.
func (d *dir) writeFooter(g *segment) error {
	headers := sorted(g.headers)
	n := footerBytes(len(headers) / headerBytes)
	p, err := mapMemory(n)
	if err != nil {
		return err
	}
	defer func() { _ = unmap(p) }() // it was mapped above
	copy(p, headers)
	t := trailer{count: uint32(len(headers) / headerBytes), headers: g.tail, sum: pool.Sum(0, headers)}
	t.encode(p[n-trailerBytes:n], g.nonce)
	if err := g.writeAt(p[:n], g.tail); err != nil {
		return err
	}
	d.s.add(writtenBytes, int(n))
	return g.truncate(g.tail + n)
}

// sorted sorts headers by their places: several writers write them in another order.
func sorted(headers []byte) []byte {
	each := slices.Collect(slices.Chunk(headers, headerBytes))
	slices.SortFunc(each, func(a, b []byte) int {
		return int(int64(binary.LittleEndian.Uint32(a[104:])) - int64(binary.LittleEndian.Uint32(b[104:])))
	})
	return bytes.Join(each, nil)
}

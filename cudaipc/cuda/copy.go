//go:build cuda

package cuda

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
	"github.com/kvagent/kvagent/pagefault"
)

// flight is a cudaipc.Flight, its chunks and its sums. Its lane owns what is marked (lane).
type flight struct {
	*cudaipc.Flight
	of        *peer
	waits     atomic.Int32
	chunks    int   // in flight (lane)
	submitted bool  // all chunks were started (lane)
	err       error // of the first chunk that did not start, or of a page of the arena in the ring's way (lane)

	inOrder bool        // chunks follow the order of Copy.Runs (lane)
	arrived uint64      // bytes of a gather that are in the arena (lane)
	summed  sumProgress // blocks that the summers were given
	landed  time.Time   // when the copies ended; of a flight with sums

	marking sync.Mutex // of bad blocks: its lane and the summers mark them
}

// sumBytes replaces chunkBytes and maxMerged for a gather with sums: it bounds what is left to
// sum after the last byte has arrived.
const sumBytes = 2 << 20

// most returns about how many bytes a chunk of the flight has, and at most one call.
func (f *flight) most() (chunk, call uint64) {
	if f.Copy.Sum && f.Copy.Dir == cudaipc.Gather {
		return sumBytes, sumBytes
	}
	return chunkBytes, maxMerged
}

// passed ends one wait of a flight. The last one finishes the flight.
func (f *flight) passed() {
	if f.waits.Add(-1) == 0 {
		if !f.landed.IsZero() {
			f.End.SumTime = time.Since(f.landed)
		}
		f.Finish()
	}
}

// Copy checks a copy and puts it into the lane of its direction.
func (p *peer) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	if err := p.d.alive(); err != nil {
		return nil, err
	}
	return p.StartCopy(c, int64(len(p.d.arena)), func(f *cudaipc.Flight) error {
		p.d.submit(&flight{Flight: f, of: p})
		return nil
	})
}

func (d *Device) submit(f *flight) {
	f.waits.Store(1) // for the copies
	if f.Copy.Sum {
		f.End.Sums = make([]uint32, len(f.Copy.Blocks))
		if f.Copy.Dir == cudaipc.Scatter { // its bytes are there: they are summed beside the copy
			d.sums.enqueue(f, math.MaxUint64)
		}
	}
	d.lanes[f.Copy.Dir].flights.put(f) // bounded by MaxCopies per peer
}

// copied ends a flight's copies; its lane calls it when none is in flight any more. Copies around
// the death of the peer's process are not trusted: a driver may cut them short without an error.
func (d *Device) copied(f *flight) {
	if f.err == nil && f.of.exiting() {
		f.err = cudaipc.ErrPeerDead
	}
	if f.err != nil {
		for i := range f.Copy.Blocks {
			f.mark(i, f.err)
		}
	} else if f.Copy.Sum && f.Copy.Dir == cudaipc.Gather {
		d.sums.enqueue(f, math.MaxUint64)
	}
	if f.Copy.Sum {
		f.landed = time.Now()
	}
	f.passed()
}

// arrived counts n more bytes of a flight that have arrived; its lane calls it. Whole blocks of a
// gather are summed while later ones are copied.
func (d *Device) arrived(f *flight, n uint64) {
	f.arrived += n
	if f.Copy.Sum && f.Copy.Dir == cudaipc.Gather && f.inOrder {
		d.sums.enqueue(f, f.arrived)
	}
}

// mark notes that a block did not arrive, or could not be summed.
func (f *flight) mark(block int, err error) {
	f.marking.Lock()
	defer f.marking.Unlock()
	f.End.MarkBad(block, len(f.Copy.Blocks), err)
}

// copyGuarded copies src to dst, one of which lies in the arena. If a page cannot be read or
// written, the flight ends with all of its blocks bad.
func (f *flight) copyGuarded(arena, dst, src []byte) {
	if err := pagefault.Guard(arena, nil, func() { copy(dst, src) }); err != nil {
		f.err = err
	}
}

// issue is the calls of one chunk, sorted by their path.
type issue struct {
	each, batch driver.List
	rects       []driver.Rect
}

func (is *issue) reset() {
	is.each.Reset()
	is.batch.Reset()
	is.rects = is.rects[:0]
}

// add puts a rectangle, or a single copy, on its path.
func (l *lane) add(r *rect) {
	host := driver.HostAddr(l.d.arena) + r.off
	if r.rows > 1 && l.rowsPath == CopyRect {
		c := driver.Rect{Dst: host, Src: r.dev, Width: r.n, Rows: r.rows, DstPitch: r.offPitch, SrcPitch: r.devPitch}
		if l.dir == cudaipc.Scatter {
			c.Dst, c.Src, c.DstPitch, c.SrcPitch = r.dev, host, r.devPitch, r.offPitch
		}
		l.issue.rects = append(l.issue.rects, c)
		return
	}
	list := &l.issue.each
	if l.flatPath == CopyBatch && driver.HasBatch() {
		list = &l.issue.batch
	}
	for i := range r.rows {
		l.addRow(list, r.dev+i*r.devPitch, host+i*r.offPitch, r.n)
	}
}

func (l *lane) addRow(list *driver.List, dev, host, n uint64) {
	if l.dir == cudaipc.Scatter {
		list.Add(dev, host, n)
	} else {
		list.Add(host, dev, n)
	}
}

// send starts what was added. A batch of one is a single copy.
func (l *lane) send() error {
	is := &l.issue
	toHost := l.dir == cudaipc.Gather
	if len(is.batch.Len) == 1 {
		is.each.Add(is.batch.Dst[0], is.batch.Src[0], is.batch.Len[0])
		is.batch.Reset()
	}
	if len(is.rects) > 0 {
		if err := l.stream.Rects(is.rects, toHost); err != nil {
			return err
		}
	}
	if len(is.batch.Len) > 0 {
		if err := l.stream.Batch(&is.batch); err != nil {
			return err
		}
	}
	return l.stream.Each(&is.each, toHost)
}

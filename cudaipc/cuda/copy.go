//go:build cuda

package cuda

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pagefault"
)

// flight is a flight with what it waits for: its copies, and the parts of its sums.
type flight struct {
	*cudaipc.Flight
	of        *peer
	copy      *cudaipc.Copy
	waits     atomic.Int32
	chunks    int   // in flight; its lane's
	submitted bool  // all chunks were started; its lane's
	err       error // of the first chunk that did not start; its lane's

	inOrder bool        // chunks follow the order of Copy.Runs; its lane's
	arrived uint64      // bytes of a gather that are in the arena; its lane's
	summed  sumProgress // to the summers; whoever gives them

	faults faults
}

// sumBytes is chunkBytes, and maxMerged, for a gather whose blocks are summed: so much is still to
// be summed behind the last byte.
const sumBytes = 2 << 20

// most returns how many bytes one chunk of the flight has, about, and one call at most.
func (f *flight) most() (chunk, call uint64) {
	if f.copy.Sum && f.copy.Dir == cudaipc.Gather {
		return sumBytes, sumBytes
	}
	return chunkBytes, maxMerged
}

// passed ends one wait of a flight, the last one the flight.
func (f *flight) passed() {
	if f.waits.Add(-1) == 0 {
		f.markFaults()
		f.Finish()
	}
}

// Copy checks a copy and puts it into the lane of its direction.
func (d *Device) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	if err := d.alive(); err != nil {
		return 0, err
	}
	p, err := d.table.Begin(c.Peer)
	if err != nil {
		return 0, err
	}
	if err := p.CheckCopy(c, len(d.arena)); err != nil {
		p.Release()
		return 0, fmt.Errorf("peer %d: %w", p.ID, err)
	}
	return d.table.Enter(p, func(f *cudaipc.Flight) { d.submit(&flight{Flight: f, of: p, copy: c}) })
}

func (d *Device) submit(f *flight) {
	f.waits.Store(1) // for the copies
	if f.copy.Sum {
		f.End.Sums = make([]uint32, len(f.copy.Blocks))
		if f.copy.Dir == cudaipc.Scatter { // its bytes are there: they are summed beside the copy
			d.sums.enqueue(f, math.MaxUint64)
		}
	}
	d.lanes[f.copy.Dir].flights.put(f) // bounded by MaxCopies per peer
}

// copied is called by the lane when no copy of a flight is in flight any more. What was copied
// around the death of the peer's process is not trusted: a driver may end such copies short, and
// say nothing.
func (d *Device) copied(f *flight) {
	if f.err == nil && f.of.exiting() {
		f.err = cudaipc.ErrPeerDead
	}
	if f.err != nil {
		for i := range f.copy.Blocks {
			f.End.MarkBad(i, len(f.copy.Blocks), f.err)
		}
	} else if f.copy.Sum && f.copy.Dir == cudaipc.Gather {
		d.sums.enqueue(f, math.MaxUint64)
	}
	f.passed()
}

// arrived is called by the lane when n more bytes of a flight are where they belong. Blocks of a
// gather that are whole are summed while those behind them come.
func (d *Device) arrived(f *flight, n uint64) {
	f.arrived += n
	if f.copy.Sum && f.copy.Dir == cudaipc.Gather && f.inOrder {
		d.sums.enqueue(f, f.arrived)
	}
}

// Done waits for a copy. A lost device answers ErrLost: the copy is not known to have ended.
func (d *Device) Done(t cudaipc.Ticket, timeout time.Duration) (cudaipc.Done, bool, error) {
	for deadline := time.Now().Add(timeout); ; {
		if err := d.alive(); err != nil {
			return cudaipc.Done{}, false, err
		}
		left := min(time.Until(deadline), lostWait)
		end, ok, err := d.table.Done(t, left)
		if ok || err != nil || left < lostWait {
			return end, ok, err
		}
	}
}

// lostWait is how long a Done that waits may not see that the device was lost.
const lostWait = 50 * time.Millisecond

// torn is what could not be read from the arena or written to it: the ends of a copy's blocks that
// lie there. Its lane and the summers note it.
type faults struct {
	sync.Mutex
	places []place
	err    error // of the first
}

// noteFault notes that n bytes at an offset of the arena did not arrive, or could not be summed.
func (f *flight) noteFault(off, n uint64, err error) {
	f.faults.Lock()
	defer f.faults.Unlock()
	f.faults.places = append(f.faults.places, place{off, n})
	if f.faults.err == nil {
		f.faults.err = err
	}
}

// faultUnit is what carry copies in one piece where a page cannot be had: the smallest page.
const faultUnit = 4 << 10

// carry copies src to dst, one of which lies in the arena at off. Pages that cannot be had are
// torn; the GPU gets whatever was there before, and nobody takes it for the block's bytes.
func (f *flight) copyGuarded(arena, dst, src []byte, off uint64) {
	n := min(len(dst), len(src))
	if pagefault.Guard(arena, nil, func() { copy(dst, src) }) == nil {
		return
	}
	for at := 0; at < n; {
		to := min(n, at+faultUnit-int((off+uint64(at))%faultUnit))
		if err := pagefault.Guard(arena, nil, func() { copy(dst[at:to], src[at:to]) }); err != nil {
			f.noteFault(off+uint64(at), uint64(to-at), err)
		}
		at = to
	}
}

// markFaults makes the blocks bad that have bytes in torn places. Nothing of the flight is under
// way any more.
func (f *flight) markFaults() {
	if f.faults.err == nil {
		return
	}
	run := 0
	for i := range f.copy.Blocks {
		bad := false
		for range f.copy.Blocks[i].Runs {
			bad = bad || f.faults.overlaps(&f.copy.Runs[run])
			run++
		}
		if bad {
			f.End.MarkBad(i, len(f.copy.Blocks), f.faults.err)
		}
	}
}

func (t *faults) overlaps(r *cudaipc.Run) bool {
	for _, p := range t.places {
		if from := uint64(r.ArenaOff); p.off < from+uint64(r.Len) && from < p.off+p.n {
			return true
		}
	}
	return false
}

//go:build cuda

package cuda

import (
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
)

// ring is the pinned memory of a lane, in two halves, for copies of unpinned pieces of the arena:
// bytes are staged there between the GPU and the arena.
type ring struct {
	halves [2][]byte
	busy   [2]bool
	mem    []byte
}

// staged is the content of one half.
type staged struct {
	half   int
	places []place
}

// place is a range of the arena; its bytes follow those of the place before it in the half.
type place struct{ off, n uint64 }

func newRing(size int) (*ring, error) {
	mem, err := driver.AllocPinned(size)
	if err != nil {
		return nil, err
	}
	return &ring{mem: mem, halves: [2][]byte{mem[:size/2], mem[size/2 : size/2*2]}}, nil
}

func (r *ring) room() bool { return !r.busy[0] || !r.busy[1] }

// begin takes a free half; the caller has checked room.
func (r *ring) begin() *staged {
	half := 0
	if r.busy[0] {
		half = 1
	}
	r.busy[half] = true
	return &staged{half: half}
}

// end frees a half; for a gather, after its bytes are in the arena.
func (r *ring) end(s *staged, arena []byte, f *flight) {
	if f.copy.Dir == cudaipc.Gather {
		from := r.halves[s.half]
		for _, p := range s.places {
			f.copyGuarded(arena, arena[p.off:p.off+p.n], from, p.off)
			from = from[p.n:]
		}
	}
	r.busy[s.half] = false
}

func (r *ring) close() error {
	if r == nil {
		return nil
	}
	return driver.FreePinned(r.mem)
}

// viaRing starts calls between the GPU and a half of the ring, for unpinned pieces. Pieces that do
// not fit stay in l.rects.
func (l *lane) viaRing() (*staged, uint64, error) {
	s := l.ring.begin()
	half := l.ring.halves[s.half]
	host := driver.HostAddr(half)
	l.issue.reset()
	var used uint64
	for len(l.rects) > 0 && !l.d.pins.at(l.rects[0].off) {
		first := l.rects[0].span
		n := min(first.n, uint64(len(half))-used)
		if n == 0 {
			break
		}
		list := &l.issue.each
		if driver.HasBatch() && first.n <= 1<<20 {
			list = &l.issue.batch
		}
		l.addRow(list, first.dev, host+used, n)
		if l.dir == cudaipc.Scatter {
			l.flight.copyGuarded(l.d.arena, half[used:used+n], l.d.arena[first.off:], first.off)
		}
		s.places = append(s.places, place{first.off, n})
		used += n
		l.cut(n)
	}
	l.counts.ring.Add(used)
	return s, used, l.send()
}

// cut removes the first n bytes of the first row from l.rects.
func (l *lane) cut(n uint64) {
	r := &l.rects[0]
	if n < r.n { // the rest of the row on its own, in front of the other rows
		rest := rect{span: span{r.dev + n, r.off + n, r.n - n, r.in}, rows: 1}
		if r.rows == 1 {
			*r = rest
			return
		}
		l.dropRow()
		l.rects = append([]rect{rest}, l.rects...)
		return
	}
	l.dropRow()
}

// dropRow removes the first row.
func (l *lane) dropRow() {
	r := &l.rects[0]
	if r.rows == 1 {
		l.rects = l.rects[1:]
		return
	}
	r.dev, r.off, r.rows = r.dev+r.devPitch, r.off+r.offPitch, r.rows-1
}

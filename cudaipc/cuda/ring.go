//go:build cuda

package cuda

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

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
	if f.Copy.Dir == cudaipc.Gather {
		from := r.halves[s.half]
		for _, p := range s.places {
			f.copyGuarded(arena, arena[p.off:p.off+p.n], from[:p.n])
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

// viaRing starts calls between the GPU and a half of the ring, for as many unpinned pieces as fit.
func (l *lane) viaRing() (*staged, uint64, error) {
	s := l.ring.begin()
	half := l.ring.halves[s.half]
	host := driver.HostAddr(half)
	l.issue.reset()
	var used uint64
	for len(l.rects) > 0 && !l.d.pins.at(l.rects[0].off) {
		if l.rects[0].rows > 1 {
			l.flatten()
		}
		r := &l.rects[0]
		n := min(r.n, uint64(len(half))-used)
		if n == 0 {
			break
		}
		list := &l.issue.each
		if driver.HasBatch() && r.n <= 1<<20 {
			list = &l.issue.batch
		}
		l.addRow(list, r.dev, host+used, n)
		if l.dir == cudaipc.Scatter {
			l.flight.copyGuarded(l.d.arena, half[used:used+n], l.d.arena[r.off:r.off+n])
		}
		s.places = append(s.places, place{r.off, n})
		used += n
		if r.dev, r.off, r.n = r.dev+n, r.off+n, r.n-n; r.n == 0 {
			l.rects = l.rects[1:]
		}
	}
	l.ringBytes.Add(used)
	return s, used, l.send()
}

// flatten replaces the first rectangle by its rows.
func (l *lane) flatten() {
	first := l.rects[0]
	rows := make([]rect, first.rows, int(first.rows)+len(l.rects)-1)
	for i := range rows {
		at := first.span
		at.dev, at.off = at.dev+uint64(i)*first.devPitch, at.off+uint64(i)*first.offPitch
		rows[i] = rect{span: at, rows: 1}
	}
	l.rects = append(rows, l.rects[1:]...)
}

// pins pins the arena in the background, piece by piece. Copies of a piece that is not pinned go
// through a ring. A refusal of the driver ends the pinning: the rest goes through the rings for
// good, and Info reports it.
type pins struct {
	d      *Device
	piece  uint64
	pinned []atomic.Bool // by piece
	role   *driver.Role
	stop   chan struct{}
	bytes  atomic.Int64 // pinned
	ended  atomic.Bool
	why    atomic.Pointer[error] // of the refusal
	begun  time.Time
	took   atomic.Int64 // ns, when it has ended
	since  atomic.Int64 // ns after begun: when the current piece was begun
}

func startPins(d *Device, o *Options) (*pins, error) {
	piece := uint64(o.PinPiece)
	p := &pins{
		d:      d,
		piece:  piece,
		stop:   make(chan struct{}),
		begun:  time.Now(),
		pinned: make([]atomic.Bool, (uint64(len(d.arena))+piece-1)/piece),
	}
	var err error
	if p.role, err = driver.StartRole(d.ctx); err != nil {
		return nil, err
	}
	if o.NoPin {
		p.ended.Store(true)
		return p, nil
	}
	p.role.Begin(p.run)
	return p, nil
}

func (p *pins) run() {
	defer func() {
		p.took.Store(int64(time.Since(p.begun)))
		p.ended.Store(true)
	}()
	for i := range p.pinned {
		select {
		case <-p.stop:
			return
		case <-p.d.lost.ch:
			return
		default:
		}
		mem := p.mem(i)
		p.since.Store(int64(time.Since(p.begun)))
		if err := p.d.judge(driver.Register(mem)); err != nil {
			p.why.Store(&err)
			return
		}
		p.bytes.Add(int64(len(mem)))
		p.pinned[i].Store(true)
	}
}

func (p *pins) mem(i int) []byte {
	from := uint64(i) * p.piece
	return p.d.arena[from:min(from+p.piece, uint64(len(p.d.arena)))]
}

// at reports whether the piece of an offset is pinned.
func (p *pins) at(off uint64) bool { return p.pinned[off/p.piece].Load() }

// close stops the pinning after the current piece and unpins everything.
func (p *pins) close() error {
	close(p.stop)
	var errs []error
	p.role.Do(func() {
		for i := range p.pinned {
			if p.pinned[i].Load() && p.d.alive() == nil {
				errs = append(errs, p.d.judge(driver.Unregister(p.mem(i))))
			}
		}
	})
	p.role.Close()
	return errors.Join(errs...)
}

// fillInfo adds the state of the pinning to a device's.
func (p *pins) fillInfo(i *cudaipc.CUDAInfo) {
	i.PinDone = p.ended.Load() // first: then Pinned is complete
	i.Pinned = p.bytes.Load()
	took := time.Duration(p.took.Load())
	if !i.PinDone {
		took = time.Since(p.begun)
	}
	i.PinSeconds = took.Seconds()
	if why := p.why.Load(); why != nil {
		i.PinError = (*why).Error()
	} else if waits := took - time.Duration(p.since.Load()); !i.PinDone && waits > MaxPinCall {
		i.PinError = fmt.Sprintf("cuMemHostRegister of %d bytes has not returned for %v",
			min(int64(p.piece), i.Arena-i.Pinned), waits.Round(time.Second))
	}
	if i.PinError != "" {
		i.Refused = i.Arena - i.Pinned
	}
}

// Info returns the state of the device.
func (d *Device) Info() cudaipc.CUDAInfo {
	i := cudaipc.CUDAInfo{
		Name: d.gpu.Name, GPU: cudaipc.UUID(d.gpu.UUID), Driver: driver.Version(), Batch: driver.HasBatch(),
		Imports: d.imports.Load(), Arena: int64(len(d.arena)),
	}
	d.pins.fillInfo(&i)
	for _, l := range d.lanes {
		i.RingBytes += l.ringBytes.Load()
	}
	if err := d.alive(); err != nil {
		i.Lost = err.Error()
		return i
	}
	d.opener.Do(func() { i.Free, i.Total, _ = d.ctx.Memory() })
	return i
}

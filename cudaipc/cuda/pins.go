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
		Limits: d.limits, Imports: d.imports.Load(), Arena: int64(len(d.arena)),
	}
	d.pins.fillInfo(&i)
	for _, l := range d.lanes {
		i.RingBytes += l.counts.ring.Load()
		i.Singles += l.counts.singles.Load()
		i.Batches += l.counts.batches.Load()
		i.Rects += l.counts.rects.Load()
	}
	if err := d.alive(); err != nil {
		i.Lost = err.Error()
		return i
	}
	d.opener.Do(func() { i.Free, i.Total, _ = d.ctx.Memory() })
	return i
}

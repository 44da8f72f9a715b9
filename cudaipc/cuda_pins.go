//go:build cuda

package cudaipc

import (
	"errors"
	"sync/atomic"

	"github.com/kvagent/kvagent/cudaipc/driver"
)

// pins is the pinning of the arena: in the background, piece by piece. Copies of a piece that is not pinned go through a ring. A
// piece that the driver refuses ends the pinning: what remains goes through the rings for good, and Info says so.
type pins struct {
	d      *CUDA
	piece  uint64
	pinned []atomic.Bool // by piece
	role   *role
	stop   chan struct{}
	bytes  atomic.Int64 // pinned
	ended  atomic.Bool
	why    atomic.Pointer[error] // of the refusal
}

func startPins(d *CUDA, o *CUDAOptions) (*pins, error) {
	piece := uint64(o.PinPiece)
	p := &pins{d: d, piece: piece, stop: make(chan struct{}), pinned: make([]atomic.Bool, (uint64(len(d.arena))+piece-1)/piece)}
	var err error
	if p.role, err = startRole(d.ctx); err != nil {
		return nil, err
	}
	if o.NoPin {
		p.ended.Store(true)
		return p, nil
	}
	p.role.begin(p.run)
	return p, nil
}

func (p *pins) run() {
	defer p.ended.Store(true)
	for i := range p.pinned {
		select {
		case <-p.stop:
			return
		case <-p.d.lost.ch:
			return
		default:
		}
		mem := p.mem(i)
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

// at says whether the piece of an offset is pinned.
func (p *pins) at(off uint64) bool { return p.pinned[off/p.piece].Load() }

// close stops the pinning behind the piece that is being pinned, and lets all go.
func (p *pins) close() error {
	close(p.stop)
	var errs []error
	p.role.do(func() {
		for i := range p.pinned {
			if p.pinned[i].Load() && p.d.alive() == nil {
				errs = append(errs, p.d.judge(driver.Unregister(p.mem(i))))
			}
		}
	})
	p.role.close()
	return errors.Join(errs...)
}

// Info is the state of the device now.
func (d *CUDA) Info() CUDAInfo {
	i := CUDAInfo{
		Name: d.gpu.Name, GPU: UUID(d.gpu.UUID), Driver: driver.Version(), Batch: driver.HasBatch(), Paths: d.lanes[0].table.String(),
		Imports: d.imports.Load(), Arena: int64(len(d.arena)), Pinned: d.pins.bytes.Load(), PinDone: d.pins.ended.Load(),
	}
	if why := d.pins.why.Load(); why != nil {
		i.PinError, i.Refused = (*why).Error(), i.Arena-i.Pinned
	}
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
	d.opener.do(func() { i.Free, i.Total, _ = d.ctx.Memory() })
	return i
}

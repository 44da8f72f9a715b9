//go:build cuda

package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
)

// Device is the device on a GPU's memory. It opens what engines export by CUDA IPC, or as
// descriptors of virtual memory, and copies with the GPU's copy engines. A few goroutines with
// threads of their own make all calls of the driver:
//
//	opener   opens and closes peers
//	asker    asks engines' events, for Poll
//	lanes    one per direction: start copies and watch their ends
//	pinner   pins the arena, piece by piece
//	sampler  reads engines' memory for the sums of samples
//
// A driver error that no later call survives makes the device lost: every call answers ErrLost
// from then on, and copies in flight are not known to have ended until this process has. No call
// here waits for all of a GPU's work, and no stream waits for an engine's event.
type Device struct {
	peers cudaipc.Peers
	arena []byte
	gpu   driver.GPU
	ctx   *driver.Context

	opener, asker *driver.Role
	lanes         [2]*lane // by Direction
	pins          *pins
	sums          *summers
	sampler       *sampler
	imports       atomic.Int64 // CUDAInfo.Imports

	lost struct {
		sync.Once
		ch  chan struct{} // closed when err is there
		err error
	}
}

var _ cudaipc.Device = (*Device)(nil)

// Built reports whether this program is built with the device (build tag cuda).
const Built = true

// Open opens a GPU for peers. Close releases everything.
func Open(o Options) (*Device, error) {
	o.PinPiece, o.Ring = cmp.Or(o.PinPiece, DefaultPinPiece), cmp.Or(o.Ring, DefaultRing)
	gpu, err := FindGPU(o.GPU)
	if err != nil {
		return nil, err
	}
	d := &Device{arena: o.Arena, gpu: gpu}
	d.lost.ch = make(chan struct{})
	if err := d.open(&o); err != nil {
		return nil, fmt.Errorf("%s: %w", cudaipc.UUID(gpu.UUID), errors.Join(err, d.shut()))
	}
	return d, nil
}

// open starts the roles. After an error, shut ends those that were started.
func (d *Device) open(o *Options) (err error) {
	if d.ctx, err = driver.Retain(d.gpu.Ordinal); err != nil {
		return withOpenHint(err)
	}
	if d.opener, err = driver.StartRole(d.ctx); err != nil {
		return err
	}
	d.opener.Do(d.ctx.Lower)
	if d.asker, err = driver.StartRole(d.ctx); err != nil {
		return err
	}
	d.sums = startSummers(d.arena)
	if d.sampler, err = startSampler(d); err != nil {
		return err
	}
	if d.pins, err = startPins(d, o); err != nil {
		return err
	}
	for dir := range d.lanes {
		if d.lanes[dir], err = startLane(d, cudaipc.Direction(dir), o); err != nil {
			return err
		}
	}
	return nil
}

// shut ends what open has started. No copy is in flight, or the device is lost.
func (d *Device) shut() error {
	var errs []error
	for _, l := range d.lanes {
		if l != nil {
			errs = append(errs, l.close())
		}
	}
	if d.pins != nil {
		errs = append(errs, d.pins.close())
	}
	if d.sums != nil {
		d.sums.close()
	}
	d.sampler.close()
	for _, r := range []*driver.Role{d.asker, d.opener} {
		if r != nil {
			r.Close()
		}
	}
	if d.alive() != nil { // pinned memory stays pinned, and so mapped, until the process ends
		return errors.Join(errs...)
	}
	if d.ctx != nil {
		errs = append(errs, d.ctx.Release())
	}
	return errors.Join(errs...)
}

// Close frees the device; a lost one without calling the driver.
func (d *Device) Close() error {
	lost := d.alive()
	if err := d.peers.Close(); err != nil {
		return errors.Join(err, lost)
	}
	return errors.Join(d.shut(), lost)
}

// alive returns the error of a lost device, nil before.
func (d *Device) alive() error {
	select {
	case <-d.lost.ch:
		return d.lost.err
	default:
		return nil
	}
}

// lose marks the device as lost by an error that no later call survives.
func (d *Device) lose(err error) {
	d.lost.Do(func() {
		d.lost.err = fmt.Errorf("%w: %s: %w", cudaipc.ErrLost, cudaipc.UUID(d.gpu.UUID), err)
		close(d.lost.ch)
	})
}

// judge returns an answer of the driver; a sticky error loses the device.
func (d *Device) judge(err error) error {
	if driver.IsSticky(err) {
		d.lose(err)
		return d.alive()
	}
	return err
}

//go:build cuda

package cuda

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
)

// rawWait is how long one copy may take.
const rawWait = 30 * time.Second

// rawCopy is one direction of Raw: a stream, and memory on both sides, used in a role.
type rawCopy struct {
	stream driver.Stream
	end    driver.Event
	gpu    driver.Addr
	host   []byte
	toHost bool
}

// Raw measures single copies of size bytes between GPU memory and pinned memory of its own: what
// all other paths are held against. It takes 2*size bytes of both meanwhile. The median of rounds
// counts.
func (d *Device) Raw(size int64, rounds int) (c RawCopies, err error) {
	if err := d.alive(); err != nil {
		return c, err
	}
	if size <= 0 || size > MaxRawCopy || rounds < 1 {
		return c, fmt.Errorf("a raw copy of %d bytes, %d times, want 1 to %d bytes and 1 or more: %w", size, rounds,
			int64(MaxRawCopy), cudaipc.ErrRange)
	}
	r, err := driver.StartRole(d.ctx)
	if err != nil {
		return c, d.judge(err)
	}
	defer r.Close()
	r.Do(func() { c, err = raw(size, rounds) })
	return c, d.judge(err)
}

func raw(size int64, rounds int) (c RawCopies, err error) {
	out, in := &rawCopy{toHost: true}, &rawCopy{}
	defer func() { err = errors.Join(err, out.close(), in.close()) }()
	if err := errors.Join(out.open(size), in.open(size)); err != nil {
		return c, err
	}
	for _, m := range []struct {
		rate   *float64
		copies []*rawCopy
	}{{&c.ToHost, []*rawCopy{out}}, {&c.ToGPU, []*rawCopy{in}}, {&c.Both, []*rawCopy{out, in}}} {
		took, err := medianOf(m.copies, rounds)
		if err != nil {
			return c, err
		}
		*m.rate = float64(size) * float64(len(m.copies)) / took.Seconds()
	}
	return c, nil
}

func medianOf(copies []*rawCopy, rounds int) (time.Duration, error) {
	took := make([]time.Duration, rounds)
	for i := range took {
		begin := time.Now()
		for _, w := range copies {
			if err := w.start(); err != nil {
				return 0, err
			}
		}
		for _, w := range copies {
			if err := w.wait(begin.Add(rawWait)); err != nil {
				return 0, err
			}
		}
		took[i] = time.Since(begin)
	}
	slices.Sort(took)
	return took[rounds/2], nil
}

func (w *rawCopy) open(size int64) (err error) {
	if w.stream, err = driver.NewStream(0); err != nil {
		return err
	}
	if w.end, err = driver.NewEvent(false); err != nil {
		return err
	}
	if w.gpu, err = driver.Alloc(size); err != nil {
		return err
	}
	w.host, err = driver.AllocPinned(int(size))
	return err
}

func (w *rawCopy) start() error {
	list := driver.List{
		Dst: []uint64{uint64(w.gpu)},
		Src: []uint64{driver.HostAddr(w.host)},
		Len: []uint64{uint64(len(w.host))},
	}
	if w.toHost {
		list.Dst, list.Src = list.Src, list.Dst
	}
	if err := w.stream.Each(&list, w.toHost); err != nil {
		return err
	}
	return w.end.Record(w.stream)
}

func (w *rawCopy) wait(until time.Time) error {
	for {
		if fired, err := w.end.Fired(); fired || err != nil {
			return err
		}
		if time.Now().After(until) {
			return fmt.Errorf("%d bytes did not arrive within %v", len(w.host), rawWait)
		}
	}
}

func (w *rawCopy) close() error {
	var errs []error
	if w.host != nil {
		errs = append(errs, driver.FreePinned(w.host))
	}
	if w.gpu != 0 {
		errs = append(errs, driver.Free(w.gpu))
	}
	if w.end != (driver.Event{}) {
		errs = append(errs, w.end.Destroy())
	}
	if w.stream != (driver.Stream{}) {
		errs = append(errs, w.stream.Destroy())
	}
	return errors.Join(errs...)
}

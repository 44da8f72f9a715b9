//go:build cuda

package cuda

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
	"github.com/kvagent/kvagent/cudaipc/kernel"
)

// Sizes and limits of Calibrate's measurements.
const (
	calibrateBytes  = 32 << 20 // of GPU memory, and of pinned memory, meanwhile
	calibrateRounds = 5        // of each; the median counts
	calibrateWait   = 30 * time.Second
)

// calibrateLens are the measured lengths of runs, bytes. Each gives a rule for runs longer than
// the length before it.
var calibrateLens = []uint64{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20}

// calibration is the memory of Calibrate. All its methods are called in a role.
type calibration struct {
	within time.Duration // of all of it
	until  time.Time     // the end of that
	stream driver.Stream
	end    driver.Event
	gpu    driver.Addr
	host   []byte
	kernel copyKernel // loaded if it is measured
	lists  *lists
}

// Calibrate measures the paths on this GPU and returns their table. It takes some seconds; other
// copies at the same time distort it. After within it fails, unless a call of the driver hangs.
func (d *Device) Calibrate(within time.Duration) (cudaipc.CopyTable, error) {
	if err := d.alive(); err != nil {
		return cudaipc.CopyTable{}, err
	}
	r, err := driver.StartRole(d.ctx)
	if err != nil {
		return cudaipc.CopyTable{}, fmt.Errorf("calibrate: %w", d.judge(err))
	}
	defer r.Close()
	table := cudaipc.CopyTable{GPU: d.gpu.Name, Driver: driver.Version(), Version: cudaipc.CopyTableVersion}
	r.Do(func() { table.Rules, err = calibrate(d.measureKernel, within) })
	if err != nil {
		return cudaipc.CopyTable{}, fmt.Errorf("calibrate: %w", d.judge(err))
	}
	return table, nil
}

func calibrate(withKernel bool, within time.Duration) (rules []cudaipc.CopyRule, err error) {
	c := &calibration{within: within, until: time.Now().Add(within)}
	defer func() { err = errors.Join(err, c.close()) }()
	if err := c.open(); err != nil {
		return nil, err
	}
	if withKernel {
		if err := c.openKernel(); err != nil {
			return nil, err
		}
	}
	for _, n := range calibrateLens {
		rule, err := c.rule(n)
		if err != nil {
			return nil, err
		}
		rules = append(rules, rule)
	}
	rules[len(rules)-1].UpTo = math.MaxUint64
	return joined(rules), nil
}

func (c *calibration) open() (err error) {
	if c.stream, err = driver.NewStream(0); err != nil {
		return err
	}
	if c.end, err = driver.NewEvent(false); err != nil {
		return err
	}
	if c.gpu, err = driver.Alloc(calibrateBytes); err != nil {
		return err
	}
	c.host, err = driver.AllocPinned(calibrateBytes)
	return err
}

func (c *calibration) openKernel() (err error) {
	if c.kernel.load(); c.kernel.err != nil {
		return c.kernel.err
	}
	c.lists, err = newLists()
	return err
}

func (c *calibration) close() error {
	errs := []error{c.lists.close(), c.kernel.unload()}
	if c.host != nil {
		errs = append(errs, driver.FreePinned(c.host))
	}
	if c.gpu != 0 {
		errs = append(errs, driver.Free(c.gpu))
	}
	if c.end != (driver.Event{}) {
		errs = append(errs, c.end.Destroy())
	}
	if c.stream != (driver.Stream{}) {
		errs = append(errs, c.stream.Destroy())
	}
	return errors.Join(errs...)
}

// joined merges neighbouring rules with the same paths.
func joined(rules []cudaipc.CopyRule) []cudaipc.CopyRule {
	out := rules[:1]
	for _, r := range rules[1:] {
		if last := &out[len(out)-1]; last.Flat == r.Flat && last.Rows == r.Rows {
			last.UpTo = r.UpTo
		} else {
			out = append(out, r)
		}
	}
	return out
}

// rule measures runs of n bytes.
func (c *calibration) rule(n uint64) (cudaipc.CopyRule, error) {
	single, err := c.both(n, cudaipc.CopySingle)
	if err != nil {
		return cudaipc.CopyRule{}, err
	}
	rule, best := cudaipc.CopyRule{UpTo: n, Flat: cudaipc.CopySingle, Rows: cudaipc.CopySingle}, single
	if driver.HasBatch() {
		batch, err := c.both(n, cudaipc.CopyBatch)
		if err != nil {
			return cudaipc.CopyRule{}, err
		}
		if batch < best {
			rule.Flat, rule.Rows, best = cudaipc.CopyBatch, cudaipc.CopyBatch, batch
		}
	}
	rect, err := c.both(n, cudaipc.CopyRect)
	if err != nil {
		return cudaipc.CopyRule{}, err
	}
	rows := best
	if rect < best {
		rule.Rows, rows = cudaipc.CopyRect, rect
	}
	if c.kernel.Kernel == nil {
		return rule, nil
	}
	took, err := c.both(n, cudaipc.CopyKernel)
	if worthwhile(took, best) {
		rule.Flat = cudaipc.CopyKernel
	}
	if worthwhile(took, rows) {
		rule.Rows = cudaipc.CopyKernel
	}
	return rule, err
}

// worthwhile reports whether the kernel beats the copy engines by enough to take thread blocks
// from the engine; that cost is not measured here.
func worthwhile(took, best time.Duration) bool { return took < best*3/4 }

// both returns the time of both directions, one after the other.
func (c *calibration) both(n uint64, path cudaipc.CopyPath) (time.Duration, error) {
	out, err := c.median(n, path, true)
	if err != nil {
		return 0, err
	}
	in, err := c.median(n, path, false)
	return out + in, err
}

func (c *calibration) median(n uint64, path cudaipc.CopyPath, toHost bool) (time.Duration, error) {
	var took []time.Duration
	for range calibrateRounds {
		begin := time.Now()
		if err := c.launch(n, path, toHost); err != nil {
			return 0, err
		}
		if err := c.end.Record(c.stream); err != nil {
			return 0, err
		}
		for fired := false; !fired; {
			var err error
			if fired, err = c.end.Fired(); err != nil {
				return 0, err
			}
			if time.Now().After(c.until) {
				return 0, fmt.Errorf("it was not over within %v: other work on the GPU, or a very slow one", c.within)
			}
		}
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}

// launch copies every second run of n bytes of the GPU's memory to a dense stretch, or back.
func (c *calibration) launch(n uint64, path cudaipc.CopyPath, toHost bool) error {
	rows := calibrateBytes / (2 * n)
	if path == cudaipc.CopyRect {
		r := driver.Rect{
			Dst:      driver.HostAddr(c.host),
			Src:      uint64(c.gpu),
			Width:    n,
			Rows:     rows,
			DstPitch: n,
			SrcPitch: 2 * n,
		}
		if !toHost {
			r.Dst, r.Src, r.DstPitch, r.SrcPitch = r.Src, r.Dst, r.SrcPitch, r.DstPitch
		}
		return c.stream.Rects([]driver.Rect{r}, toHost)
	}
	if path == cudaipc.CopyKernel {
		return c.launchKernel(n, rows, toHost)
	}
	var list driver.List
	for i := range rows {
		if dev, host := uint64(c.gpu)+2*n*i, driver.HostAddr(c.host)+n*i; toHost {
			list.Add(host, dev, n)
		} else {
			list.Add(dev, host, n)
		}
	}
	if path == cudaipc.CopyBatch {
		return c.stream.Batch(&list)
	}
	return c.stream.Each(&list, toHost)
}

// launchKernel does what launch does, by the kernel.
func (c *calibration) launchKernel(n, rows uint64, toHost bool) error {
	host, err := driver.Address(c.host)
	if err != nil {
		return err
	}
	for i := range rows {
		dst, src := uint64(host)+n*i, uint64(c.gpu)+2*n*i
		if !toHost {
			dst, src = src, dst
		}
		kernel.Put(c.lists.mem, int(i), dst, src, n)
	}
	return c.kernel.Launch(c.stream, kernel.Blocks, kernel.Threads, c.lists.at, uint32(rows))
}

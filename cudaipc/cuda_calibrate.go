//go:build cuda

package cudaipc

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvagent/kvagent/cudaipc/driver"
)

// What Calibrate measures with.
const (
	calibrateBytes  = 32 << 20 // of GPU memory, and of pinned memory, meanwhile
	calibrateRounds = 5        // of each; the median counts
	calibrateWait   = 30 * time.Second
)

// CalibrateWithin is how long Calibrate takes at most, unless a call of the driver does not return; then it fails.
const CalibrateWithin = 10 * time.Second

// calibrateLens are the lengths of runs that are measured, bytes: each is a rule for those from the length before it on.
var calibrateLens = []uint64{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20}

// calibration is the memory of Calibrate. All its methods are called in a role.
type calibration struct {
	until  time.Time // the end of CalibrateWithin
	stream driver.Stream
	end    driver.Event
	gpu    driver.Addr
	host   []byte
}

// Calibrate measures the paths on this GPU and gives the table that they make. It takes some seconds, and other copies at the same
// time make it worse.
func (d *CUDA) Calibrate() (CopyTable, error) {
	if err := d.alive(); err != nil {
		return CopyTable{}, err
	}
	r, err := startRole(d.ctx)
	defer r.close()
	table := CopyTable{GPU: d.gpu.Name, Driver: driver.Version(), Version: CopyTableVersion}
	if err == nil {
		r.do(func() { table.Rules, err = calibrate() })
	}
	if err != nil {
		return CopyTable{}, fmt.Errorf("calibrate: %w", d.judge(err))
	}
	return table, nil
}

func calibrate() (rules []CopyRule, err error) {
	c := &calibration{until: time.Now().Add(CalibrateWithin)}
	defer func() { err = errors.Join(err, c.close()) }()
	if err := c.open(); err != nil {
		return nil, err
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

func (c *calibration) close() error {
	var errs []error
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

// joined makes one rule of neighbours that say the same.
func joined(rules []CopyRule) []CopyRule {
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
func (c *calibration) rule(n uint64) (CopyRule, error) {
	single, err := c.both(n, CopySingle)
	if err != nil {
		return CopyRule{}, err
	}
	rule, best := CopyRule{UpTo: n, Flat: CopySingle, Rows: CopySingle}, single
	if driver.HasBatch() {
		batch, err := c.both(n, CopyBatch)
		if err != nil {
			return CopyRule{}, err
		}
		if batch < best {
			rule.Flat, rule.Rows, best = CopyBatch, CopyBatch, batch
		}
	}
	rect, err := c.both(n, CopyRect)
	if err == nil && rect < best {
		rule.Rows = CopyRect
	}
	return rule, err
}

// both is how long both directions take, one after the other.
func (c *calibration) both(n uint64, path CopyPath) (time.Duration, error) {
	out, err := c.median(n, path, true)
	if err != nil {
		return 0, err
	}
	in, err := c.median(n, path, false)
	return out + in, err
}

func (c *calibration) median(n uint64, path CopyPath, toHost bool) (time.Duration, error) {
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
				return 0, fmt.Errorf("it was not over within %v: other work on the GPU, or a very slow one", CalibrateWithin)
			}
		}
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}

// launch copies every second run of n bytes of the GPU's memory to a dense stretch, or back.
func (c *calibration) launch(n uint64, path CopyPath, toHost bool) error {
	rows := calibrateBytes / (2 * n)
	if path == CopyRect {
		r := driver.Rect{Dst: hostAddr(c.host), Src: uint64(c.gpu), Width: n, Rows: rows, DstPitch: n, SrcPitch: 2 * n}
		if !toHost {
			r.Dst, r.Src, r.DstPitch, r.SrcPitch = r.Src, r.Dst, r.SrcPitch, r.DstPitch
		}
		return c.stream.Rects([]driver.Rect{r}, toHost)
	}
	var list driver.List
	for i := range rows {
		if dev, host := uint64(c.gpu)+2*n*i, hostAddr(c.host)+n*i; toHost {
			list.Add(host, dev, n)
		} else {
			list.Add(dev, host, n)
		}
	}
	if path == CopyBatch {
		return c.stream.Batch(&list)
	}
	return c.stream.Each(&list, toHost)
}

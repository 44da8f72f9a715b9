package proof

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/transfer/pace"
)

// limitedBatch is the bytes of one copy under a limit, as an agent gives them to a device.
const limitedBatch = 8 << 20

// checkCompute runs one kernel repeatedly in the engine: alone, while blocks are copied both ways,
// and while they are copied at half of that rate, as `kvagent serve --pace` limits it.
func checkCompute(b *bench) error {
	if err := b.open(b.sizes.region); err != nil {
		return err
	}
	e, err := b.engine(false, 2*b.sizes.region, b.sizes.fill)
	if err != nil {
		return err
	}
	peer, err := b.admit(e, true)
	if err != nil {
		return err
	}
	loop := &order{Op: opLoop, Region: 2, Len: b.sizes.fill, Rounds: b.sizes.loops}
	alone, err := e.do(loop)
	if err != nil {
		return err
	}
	beside, moved, took, err := b.besideTraffic(e, loop, peer, nil)
	if err != nil {
		return err
	}
	half := max(int64(float64(moved)/took.Seconds()/2), pace.MinRate)
	limited, movedLimited, tookLimited, err := b.besideTraffic(e, loop, peer, pace.New(half, nil))
	if err != nil {
		return err
	}
	f := b.line.Figures
	f["limited_p50_us"], f["limited_p99_us"] = limited.P50, limited.P99
	f["limited_share"] = float64(movedLimited) / tookLimited.Seconds() / (float64(moved) / took.Seconds())
	f["alone_p50_us"], f["alone_p99_us"], f["beside_p50_us"], f["beside_p99_us"] = alone.P50, alone.P99, beside.P50,
		beside.P99
	f["beside_bytes"] = float64(moved)
	b.line.say("a fill of %d MiB takes p50 %.0f us, p99 %.0f us alone, %.0f and %.0f us while %d MiB are copied, "+
		"%.0f and %.0f us at %.0f %% of that rate", b.sizes.fill>>20, alone.P50, alone.P99, beside.P50, beside.P99,
		moved>>20, limited.P50, limited.P99, 100*f["limited_share"])
	return nil
}

// besideTraffic runs a loop of the engine while blocks are copied, with a limit if there is a
// pacer. It returns the loop's times, and the bytes copied and the time they took.
func (b *bench) besideTraffic(
	e *child, loop *order, peer cudaipc.PeerID, pacer *pace.Pacer,
) (beside answer, moved int64, took time.Duration, err error) {
	begin := time.Now()
	stop := b.traffic(peer, pacer)
	beside, err = e.do(loop)
	moved, copyErr := stop()
	return beside, moved, time.Since(begin), errors.Join(err, copyErr)
}

// batches splits a copy of a region in batches, or returns it whole if size is 0.
func batches(c *cudaipc.Copy, size int64) (out []*cudaipc.Copy) {
	if size == 0 {
		return []*cudaipc.Copy{c}
	}
	for runs := c.Runs; len(runs) > 0; {
		n := min(max(int(size/int64(runs[0].Len)), 1), len(runs))
		out = append(out, &cudaipc.Copy{Peer: c.Peer, Dir: c.Dir, Runs: runs[:n],
			Blocks: []cudaipc.Block{{Runs: uint32(n)}}})
		runs = runs[n:]
	}
	return out
}

// traffic copies both ways until stop is called, which returns the bytes copied.
func (b *bench) traffic(peer cudaipc.PeerID, pacer *pace.Pacer) (stop func() (int64, error)) {
	var over atomic.Bool
	var moved atomic.Int64
	var ways sync.WaitGroup
	var errs [2]error
	for dir := range errs {
		ways.Go(func() {
			size := int64(0)
			if pacer != nil {
				size = limitedBatch
			}
			all := batches(b.scattered(peer, cudaipc.Direction(dir), 64<<10), size)
			for i := 0; i == 0 || !over.Load(); i++ {
				c := all[i%len(all)]
				bytes := int64(len(c.Runs)) * int64(c.Runs[0].Len)
				ended := pacer.Await(b.ctx, pace.Save, bytes)
				t, err := b.device.Copy(c)
				if err == nil {
					err = b.done(t)
				}
				ended()
				if err != nil {
					errs[dir] = err
					return
				}
				moved.Add(bytes)
			}
		})
	}
	return func() (int64, error) {
		over.Store(true)
		ways.Wait()
		return moved.Load(), errors.Join(errs[:]...)
	}
}

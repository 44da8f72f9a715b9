package proof

import (
	"errors"
	"sync"
	"sync/atomic"

	"github.com/kvagent/kvagent/cudaipc"
)

// checkCompute runs one kernel repeatedly in the engine, alone and while blocks are copied both
// ways.
func checkCompute(b *bench) error {
	if err := b.openMeasured(b.sizes.region); err != nil {
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
	stop := b.traffic(peer)
	beside, err := e.do(loop)
	moved, copyErr := stop()
	if err := errors.Join(err, copyErr); err != nil {
		return err
	}
	f := b.line.Figures
	f["alone_p50_us"], f["alone_p99_us"], f["beside_p50_us"], f["beside_p99_us"] = alone.P50, alone.P99, beside.P50,
		beside.P99
	f["beside_bytes"] = float64(moved)
	b.line.say("a fill of %d MiB takes p50 %.0f us, p99 %.0f us alone, %.0f and %.0f us while %d MiB are copied",
		b.sizes.fill>>20,
		alone.P50, alone.P99, beside.P50, beside.P99, moved>>20)
	return nil
}

// traffic copies both ways until stop is called, which returns the bytes copied.
func (b *bench) traffic(peer cudaipc.PeerID) (stop func() (int64, error)) {
	var over atomic.Bool
	var moved atomic.Int64
	var ways sync.WaitGroup
	var errs [2]error
	for dir := range errs {
		ways.Go(func() {
			c := b.scattered(peer, cudaipc.Direction(dir), 64<<10)
			for first := true; first || !over.Load(); first = false {
				t, err := b.device.Copy(c)
				if err == nil {
					err = b.done(t)
				}
				if err != nil {
					errs[dir] = err
					return
				}
				moved.Add(b.sizes.region)
			}
		})
	}
	return func() (int64, error) {
		over.Store(true)
		ways.Wait()
		return moved.Load(), errors.Join(errs[:]...)
	}
}

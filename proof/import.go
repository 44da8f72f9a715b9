package proof

import (
	"fmt"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// checkImport opens an engine's memory in both of its forms, also at an offset in its allocation,
// and compares every byte that is copied out and back.
func checkImport(b *bench) error {
	if err := b.open(b.sizes.region); err != nil {
		return err
	}
	for _, form := range []struct {
		name    string
		virtual bool
	}{{"handle", false}, {"virtual", true}} {
		if err := b.roundTrip(form.name, form.virtual); err != nil {
			return fmt.Errorf("%s: %w", form.name, err)
		}
	}
	return nil
}

func (b *bench) roundTrip(name string, virtual bool) error {
	n := b.sizes.every / b.sizes.piece * b.sizes.piece // whole pieces
	e, err := b.engine(virtual, n, n)
	if err != nil {
		return err
	}
	begin := time.Now()
	peer, err := b.admit(e, true)
	if err != nil {
		return err
	}
	b.line.Figures[name+"_import_ms"] = float64(time.Since(begin)) / float64(time.Millisecond)
	bad := int64(0)
	for region := cudaipc.RegionID(1); region <= 2; region++ {
		lost, err := b.outAndBack(e, peer, region, n)
		if err != nil {
			return err
		}
		bad += lost
	}
	b.line.Figures[name+"_bytes"], b.line.Figures[name+"_wrong_bytes"] = float64(4*n), float64(bad)
	b.line.say("%s: %d MiB checked, %d bytes wrong, opened in %.1f ms", name, 4*n>>20, bad,
		b.line.Figures[name+"_import_ms"])
	if bad > 0 {
		return fmt.Errorf("%d bytes wrong", bad)
	}
	return b.device.Close(peer)
}

// outAndBack copies a region to the arena and other content back, and returns how many bytes were
// wrong.
func (b *bench) outAndBack(e *child, peer cudaipc.PeerID, region cudaipc.RegionID, n int64) (int64, error) {
	seed := uint64(region)
	if _, err := e.do(&order{Op: opFill, Region: region, Seed: seed}); err != nil {
		return 0, err
	}
	if err := b.move(peer, cudaipc.Gather, region, n); err != nil {
		return 0, err
	}
	bad := wrong(b.arena.mem[:n], seed)
	pattern(b.arena.mem[:n], seed+10)
	if err := b.move(peer, cudaipc.Scatter, region, n); err != nil {
		return 0, err
	}
	a, err := e.do(&order{Op: opCheck, Region: region, Seed: seed + 10})
	return bad + a.Wrong, err
}

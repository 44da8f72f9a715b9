package disk

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// TestEndOfABatchIsWrittenBesideItsBeginning puts a batch of a piece and a half; neither write goes
// on before both have begun.
func TestEndOfABatchIsWrittenBesideItsBeginning(t *testing.T) {
	const length = enoughBytes - headerBytes
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var begun atomic.Int32
	both := make(chan struct{})
	o := Options{Dirs: []Dir{{Path: t.TempDir(), Bytes: 64 << 20}}, SegmentBytes: 8 << 20, WriteBytes: 2 * enoughBytes}
	o.faults = func(what op, _ string, _ int64, p []byte) (int, error) {
		if what != opWrite || len(p) < enoughBytes {
			return len(p), nil
		}
		if begun.Add(1) == 2 {
			close(both)
		}
		select {
		case <-both:
			return len(p), nil
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	s := open(t, o)
	items := []pool.Item{blockOf(0, length), blockOf(1, length), blockOf(2, length)}
	if err := s.Put(ctx, items); err != nil {
		t.Fatalf("%d writes have begun, want 2 at once: %v", begun.Load(), err)
	}
	for i := range items {
		wantGet(t, s, i, length, pool.OK, "after two writes at once")
	}
}

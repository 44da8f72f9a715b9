package disk

import (
	"slices"
	"sync"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// TestCallsInTurn holds the first read until two calls wait: the first has all its reads before the
// second has one, as long as it has some to hand over.
func TestCallsInTurn(t *testing.T) {
	const each, length = 8, 8 << 10
	o := small(t)
	o.ReadDepth, o.ReadBytes = 1, pageBytes
	var mu sync.Mutex
	var offsets []int64
	first, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	o.faults = func(o op, _ string, off int64, p []byte) (int, error) {
		if o == opRead {
			once.Do(func() { close(first); <-goOn })
			mu.Lock()
			defer mu.Unlock()
			offsets = append(offsets, off)
		}
		return len(p), nil
	}
	s := open(t, o)
	wantPut(t, s, 0, 2*each, length) // each after the one before
	var calls sync.WaitGroup
	begin := func(from int) {
		calls.Go(func() {
			var items []pool.Item
			for i := range each {
				items = append(items, pool.Item{Key: keyOf(from + i), Data: make([]byte, length)})
			}
			if err := s.Get(t.Context(), items); err != nil ||
				slices.ContainsFunc(items, func(it pool.Item) bool { return it.Status != pool.OK }) {
				t.Errorf("get: %v, %v", err, statuses(items))
			}
		})
	}
	begin(0)
	<-first
	begin(each)
	pooltest.Until(t, "both calls run", func() bool { return len(s.gets) == 2 })
	close(goOn)
	calls.Wait()
	if len(offsets) != 2*each || !slices.IsSorted(offsets) {
		t.Fatalf("the calls' reads were mixed: offsets %v", offsets)
	}
}

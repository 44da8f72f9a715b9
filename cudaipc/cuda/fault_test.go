//go:build cuda

package cuda

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// TestCUDAManyBadPages expects a copy all of whose pieces are bad to cost no noticeable time: its
// lane does nothing else meanwhile.
func TestCUDAManyBadPages(t *testing.T) {
	const blocks, runs, n = 32, 1 << 12, 512
	c := &cudaipc.Copy{}
	for b := range blocks {
		c.Blocks = append(c.Blocks, cudaipc.Block{Runs: runs})
		for r := range runs {
			c.Runs = append(c.Runs, cudaipc.Run{ArenaOff: int64(b*runs+r) * n, Len: n})
		}
	}
	f := &flight{Flight: &cudaipc.Flight{Copy: c}}
	begin := time.Now()
	for i := range c.Runs {
		f.fault(uint64(c.Runs[i].ArenaOff), n, errors.New("a bad page"))
	}
	if took := time.Since(begin); took > 5*time.Second || slices.Contains(f.End.Bad, false) {
		t.Errorf("%d bad pieces took %v, bad: %v", len(c.Runs), took, f.End.Bad)
	}
}

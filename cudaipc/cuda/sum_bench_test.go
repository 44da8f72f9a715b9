//go:build cuda

package cuda_test

import (
	"slices"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// BenchmarkCUDASums reports what checksums add to the time of a copy of 64 MiB in blocks of 2 MiB:
// the ratio of medians to the same copy without, in turn in the same run.
func BenchmarkCUDASums(b *testing.B) {
	const size, block = 64 << 20, 2 << 20
	for _, dir := range []cudaipc.Direction{cudaipc.Gather, cudaipc.Scatter} {
		b.Run([]string{"gather", "scatter"}[dir], func(b *testing.B) {
			f := devicetest.CUDA(b, size, cudaipc.KindCUDA, nil)
			im, err := f.Engine(b, devicetest.Spec{Regions: []int64{size}}).Import()
			if err != nil {
				b.Fatal(err)
			}
			peer := devicetest.Import(b, f.Device, im)
			var took [2][]time.Duration
			for b.Loop() {
				for sum := range took {
					c := &cudaipc.Copy{Dir: dir, Sum: sum == 1}
					for off := int64(0); off < size; off += block {
						c.Runs = append(c.Runs, cudaipc.Run{
							Region:    1,
							RegionOff: uint64(off),
							ArenaOff:  off,
							Len:       block,
						})
						c.Blocks = append(c.Blocks, cudaipc.Block{Runs: 1})
					}
					begin := time.Now()
					ticket, err := peer.Copy(c)
					if err != nil {
						b.Fatal(err)
					}
					if _, ok, err := ticket(time.Minute); !ok || err != nil {
						b.Fatal(ok, err)
					}
					took[sum] = append(took[sum], time.Since(begin))
				}
			}
			for i := range took {
				slices.Sort(took[i])
			}
			b.ReportMetric(float64(took[1][len(took[1])/2])/float64(took[0][len(took[0])/2]), "with/without")
			b.SetBytes(2 * size)
		})
	}
}

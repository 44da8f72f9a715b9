//go:build cuda

package cuda_test

import (
	"hash/crc32"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// TestCUDASumsOfLayers copies blocks whose layers lie apart layer by layer, in many chunks, and
// expects no block to be summed before its last layer is there.
func TestCUDASumsOfLayers(t *testing.T) {
	const blocks, run = 64, 64 << 10
	for name, layers := range map[string]int{"layer by layer": 2, "block by block": 1} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, devicetest.Spec{Regions: []int64{blocks * run, blocks * run}},
				func(o *cuda.Options) { o.NoPin, o.Ring = true, 1<<20 })
			c := &cudaipc.Copy{Sum: true}
			size := layers * run
			for i := range blocks {
				for l := range layers {
					c.Runs = append(c.Runs, cudaipc.Run{
						Region:    cudaipc.RegionID(l + 1),
						RegionOff: uint64(i * run),
						ArenaOff:  int64(i*size + l*run),
						Len:       run,
					})
				}
				c.Blocks = append(c.Blocks, cudaipc.Block{Runs: uint32(layers)})
			}
			for round := range uint64(5) {
				for l := range layers {
					b.do(devicetest.Op{
						Kind:   devicetest.Fill,
						Region: cudaipc.RegionID(l + 1),
						Len:    blocks * run,
						Seed:   10*round + uint64(l),
					})
				}
				ticket, err := b.peer.Copy(c)
				if err != nil {
					t.Fatal(err)
				}
				d, ok, err := ticket(30 * time.Second)
				if err != nil || !ok || d.Err != nil {
					t.Fatalf("%v, %v, %v", ok, err, d.Err)
				}
				for i := range blocks {
					if want := crc32.Checksum(b.arena[i*size:(i+1)*size],
						crc32.MakeTable(crc32.Castagnoli)); d.Sums[i] != want {
						t.Fatalf("round %d, block %d: sum %08x, its bytes have %08x", round, i, d.Sums[i], want)
					}
				}
			}
		})
	}
}

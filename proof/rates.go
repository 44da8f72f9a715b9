package proof

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/transfer/pace"
)

// fragments are the measured lengths of runs, bytes, with their aims: a share of one raw copy, or
// a rate.
var fragments = []struct {
	name  string
	bytes int64
	share float64 // of raw; 0: no target
	rate  float64 // bytes per second; 0: no target
}{
	{"4KiB", 4 << 10, 0, 23 << 30}, {"16KiB", 16 << 10, 0, 0}, {"32KiB", 32 << 10, 0, 0}, {"64KiB", 64 << 10, 0.90, 0},
	{"256KiB", 256 << 10, 0.95, 0}, {"2MiB", 2 << 20, 0.95, 0},
}

// pathShare is the least share of the fastest path's rate that the device's own paths must have.
const pathShare = 0.9

// checkPaths measures each copy path at each length, and holds those that the device uses against
// the fastest.
func checkPaths(b *bench) {
	rates := map[cuda.CopyPath]map[string]float64{}
	for _, path := range []cuda.CopyPath{cuda.CopySingle, cuda.CopyBatch, cuda.CopyRect} {
		b.part(func() { rates[path] = b.path(path) })
	}
	for _, run := range slices.Sorted(maps.Keys(rates[cuda.CopySingle])) {
		flat := max(rates[cuda.CopySingle][run], rates[cuda.CopyBatch][run])
		b.line.aim(run+" of the fastest path", rates[cuda.FlatPath][run]/flat, pathShare, false)
		b.line.aim(run+" in rows of the fastest path", rates[cuda.RowsPath][run]/max(flat, rates[cuda.CopyRect][run]),
			pathShare, false)
	}
}

// path measures the rates of one path, bytes per second, by length and way. A driver without the
// batch call has the path of single copies in its place.
func (b *bench) path(path cuda.CopyPath) map[string]float64 {
	f, _ := b.gpu(max(b.sizes.region, devicetest.MinArena), path)
	c := devicetest.Start(b, f, devicetest.Spec{Regions: []int64{2 * b.sizes.region}})
	text, rates := "", map[string]float64{}
	for _, fragment := range fragments {
		for dir, way := range []string{"d2h", "h2d"} {
			rate := b.rate(c, b.scattered(cudaipc.Direction(dir), fragment.bytes))
			rates[fragment.name+"_"+way] = rate
			b.line.Figures[fmt.Sprintf("%s_%s_%s_gib_s", path, fragment.name, way)] = rate / gib
			text += fmt.Sprintf(" %.1f", rate/gib)
		}
	}
	b.line.say("%s%s GiB/s", path, text)
	return rates
}

// scattered returns a copy between as much of the arena as a region has, and every second fragment
// of the engine's, as blocks lie layer by layer.
func (b *bench) scattered(dir cudaipc.Direction, fragment int64) *cudaipc.Copy {
	c := &cudaipc.Copy{Dir: dir}
	for at := int64(0); at+fragment <= b.sizes.region; at += fragment {
		c.Runs = append(c.Runs, cudaipc.Run{Region: 1, RegionOff: uint64(2 * at), ArenaOff: at, Len: uint32(fragment)})
	}
	c.Blocks = []cudaipc.Block{{Runs: uint32(len(c.Runs))}}
	return c
}

// rate returns the rate of copies of a region at once, bytes per second: the median of the rounds.
func (b *bench) rate(c *devicetest.Session, copies ...*cudaipc.Copy) float64 {
	var took []time.Duration
	for range b.sizes.rounds {
		begin := time.Now()
		var tickets []cudaipc.Ticket
		for _, one := range copies {
			tickets = append(tickets, c.Submit(one))
		}
		for _, ticket := range tickets {
			c.Wait(ticket)
		}
		took = append(took, time.Since(begin))
	}
	return float64(len(copies)) * float64(b.sizes.region) / median(took).Seconds()
}

func median(took []time.Duration) time.Duration {
	slices.Sort(took)
	return took[len(took)/2]
}

// limitedBatch is the bytes of one copy under a limit, as an agent gives them to a device.
const limitedBatch = 8 << 20

// checkCompute runs one kernel repeatedly in the engine: alone, while blocks are copied both ways,
// and while they are copied at half of that rate, as `kvagent serve --pace` limits it.
func checkCompute(b *bench) {
	f, _ := b.gpu(max(b.sizes.region, devicetest.MinArena), "")
	c := devicetest.Start(b, f, devicetest.Spec{Regions: []int64{2 * b.sizes.region, b.sizes.fill}})
	b.loop(c, "alone")
	stop := b.traffic(c, nil)
	b.loop(c, "beside")
	moved, took := stop()
	full := float64(moved) / took.Seconds()
	stop = b.traffic(c, pace.New(max(int64(full/2), pace.MinRate), nil))
	b.loop(c, "limited")
	movedLimited, tookLimited := stop()
	figures := b.line.Figures
	figures["beside_bytes"] = float64(moved)
	figures["limited_share"] = float64(movedLimited) / tookLimited.Seconds() / full
	b.line.say("a fill of %d MiB takes p50 %.0f us, p99 %.0f us alone, %.0f and %.0f us while %d MiB are copied, "+
		"%.0f and %.0f us at %.0f %% of that rate", b.sizes.fill>>20, figures["alone_p50_us"], figures["alone_p99_us"],
		figures["beside_p50_us"], figures["beside_p99_us"], moved>>20, figures["limited_p50_us"],
		figures["limited_p99_us"], 100*figures["limited_share"])
}

// loop runs one kernel of the engine repeatedly, and has its times as figures.
func (b *bench) loop(c *devicetest.Session, name string) {
	data := c.Do(devicetest.Op{Kind: devicetest.TimeSets, Region: 2, Len: b.sizes.fill, Step: uint64(b.sizes.loops)})
	took := make([]time.Duration, len(data)/8)
	for i := range took {
		took[i] = time.Duration(binary.LittleEndian.Uint64(data[8*i:]))
	}
	slices.Sort(took)
	for percent, d := range map[int]time.Duration{50: took[len(took)/2], 99: took[len(took)*99/100]} {
		b.line.Figures[fmt.Sprintf("%s_p%d_us", name, percent)] = float64(d) / float64(time.Microsecond)
	}
}

// traffic copies both ways, with a limit if there is a pacer, until stop is called, which returns
// the bytes copied and the time they took.
func (b *bench) traffic(c *devicetest.Session, pacer *pace.Pacer) (stop func() (int64, time.Duration)) {
	var over atomic.Bool
	var moved atomic.Int64
	var ways sync.WaitGroup
	begin := time.Now()
	for _, dir := range []cudaipc.Direction{cudaipc.Gather, cudaipc.Scatter} {
		ways.Go(func() {
			all := []*cudaipc.Copy{b.scattered(dir, 64<<10)}
			if pacer != nil {
				all = batches(all[0], limitedBatch)
			}
			for i := 0; i == 0 || !over.Load(); i++ {
				one := all[i%len(all)]
				bytes := int64(len(one.Runs)) * int64(one.Runs[0].Len)
				ended := pacer.Await(b.ctx, pace.Save, bytes)
				c.Copy(one)
				ended()
				moved.Add(bytes)
			}
		})
	}
	return func() (int64, time.Duration) {
		over.Store(true)
		ways.Wait()
		if b.Failed() {
			b.Fatal("copies failed")
		}
		return moved.Load(), time.Since(begin)
	}
}

// batches splits a copy.
func batches(c *cudaipc.Copy, size int64) (out []*cudaipc.Copy) {
	for runs := range slices.Chunk(c.Runs, int(size/int64(c.Runs[0].Len))) {
		out = append(out, &cudaipc.Copy{Dir: c.Dir, Runs: runs, Blocks: []cudaipc.Block{{Runs: uint32(len(runs))}}})
	}
	return out
}

package mover_test

import (
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
)

// BenchmarkCalls compares what one Poll and one copy of 4 KiB cost on the host device, in this
// process and in a mover.
func BenchmarkCalls(b *testing.B) {
	for _, variant := range []struct {
		name  string
		moved bool
		ask   bool
	}{{"Host", false, false}, {"Mover", true, false}, {"MoverAsked", true, true}} {
		var peer cudaipc.Peer
		open := func(b *testing.B) {
			f := devicetest.Host(b, devicetest.MinArena, cudaipc.KindFD)
			if variant.moved {
				f = devicetest.MoverFixture(b, devicetest.MinArena, cudaipc.KindFD,
					func(o *mover.Options) { o.AskEvents = variant.ask })
			}
			im, err := f.Engine(b, devicetest.Spec{Regions: []int64{64 << 20}, Events: 1}).Import()
			if err != nil {
				b.Fatal(err)
			}
			peer = devicetest.Import(b, f.Device, im)
		}
		b.Run("Poll/"+variant.name, func(b *testing.B) {
			open(b)
			for b.Loop() {
				s, err := peer.Poll(cudaipc.Wait{Event: 0, Revoke: cudaipc.None})
				if err != nil || !s.Fired {
					b.Fatal(err, s)
				}
			}
		})
		for _, size := range []struct {
			name string
			runs int
			len  uint32
		}{{"4KiB", 1, 4 << 10}, {"8MiB", 1, 8 << 20}, {"8MiBin2048", 2048, 4 << 10}} {
			b.Run("Copy"+size.name+"/"+variant.name, func(b *testing.B) {
				open(b)
				c := &cudaipc.Copy{Sum: true, Blocks: []cudaipc.Block{{Runs: uint32(size.runs)}}}
				for i := range size.runs {
					c.Runs = append(c.Runs, cudaipc.Run{
						Region:    1,
						RegionOff: uint64(i) * uint64(size.len),
						ArenaOff:  int64(i) * int64(size.len),
						Len:       size.len,
					})
				}
				for b.Loop() {
					ticket, err := peer.Copy(c)
					if err == nil {
						_, _, err = ticket(time.Minute)
					}
					if err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

package agent

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/kvagent/kvagent/ipc"
)

// The time from the last block that a prefill engine has stored to the answer that tells the decode
// engine of another node that it has the whole prompt, and to the end of its load: pulled after the
// prefill has ended, and pushed while it goes on. The decode engine asks without a pause.
func BenchmarkHandOver(b *testing.B) {
	const blocks = 48
	for name, push := range map[string]bool{"pull": false, "push": true} {
		b.Run(name, func(b *testing.B) {
			p, d := newNode(b, "k", withPool(64<<20)), newNode(b, "k", withPool(64<<20))
			x := newPair(b, p.rig, d.rig)
			q := x.remote(blocks, "", p)
			q.Want, q.Hashes = ipc.WantProbe, chain(1, blocks)
			var spent, loaded time.Duration
			for n := 0; b.Loop(); n++ {
				for i := range blocks {
					binary.LittleEndian.PutUint32(q.Hashes[i*32+8:], uint32(n))
				}
				q.Transfer = binary.LittleEndian.AppendUint32(nil, uint32(n))
				x.say(offer(string(q.Transfer), blocks))
				if push {
					ask(b, x.look, q)
					x.saves(q.Hashes, 0, blocks-4)
					for ask(b, x.look, q).Tokens < (blocks-4)*testBlockTokens {
					}
				} else {
					x.saves(q.Hashes, 0, blocks-4)
				}
				x.saves(q.Hashes, blocks-4, blocks)
				start := time.Now()
				if !push {
					x.say(offered(string(q.Transfer), blocks))
				}
				for got := ask(b, x.look, q); got.Status != ipc.LookupHit || got.Tokens < blocks*testBlockTokens; {
					got = ask(b, x.look, q)
				}
				spent += time.Since(start)
				q.Want = ipc.WantReserve
				got := ask(b, x.look, q)
				q.Want = ipc.WantProbe
				if done := x.loader.load(x.loadEpoch, got.Lease, q.Hashes, 0); !all(done, blockOK) {
					b.Fatalf("load: %v", done)
				}
				loaded += time.Since(start)
				x.decode.send(&ipc.Release{Leases: []uint64{got.Lease}})
				x.decode.send(&ipc.Delivered{Name: q.Transfer})
			}
			b.ReportMetric(float64(spent.Microseconds())/float64(b.N), "us/handover")
			b.ReportMetric(float64(loaded.Microseconds())/float64(b.N), "us/loaded")
		})
	}
}

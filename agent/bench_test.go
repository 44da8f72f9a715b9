package agent

import (
	"fmt"
	"testing"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// The cost of the handler of a look-up, without its socket: all hits, one chain that was just asked
// for.
func BenchmarkHandler(b *testing.B) {
	r := newRig(b, withPool(64<<20))
	reg := register("bench")
	scheduler, w, answer := r.joinEngine(reg)
	const most = 2048
	hashes := chain(1, most)
	for i := 0; i < most; i += testBlocks {
		if got := w[0].save(1, hashes[i*32:(i+testBlocks)*32], 0); !all(got, blockOK) {
			b.Fatalf("save: %v", got)
		}
	}
	k := r.agent.sockets.byName[socketdir.Lookup]
	acct := r.agent.registry.view.Load().seats[scheduler.welcome.Session].engine.acct
	for _, n := range []int{1, 128, most} {
		q := ipc.LookupRequest{
			Form: ipc.FormOwn, Space: answer.Space, Session: scheduler.welcome.Session, Tokens: 1 << 30,
			DeadlineUS: 1e9, HashLen: 32, Hashes: hashes[:n*32],
		}
		for want, reserve := range []bool{ipc.WantProbe: false, ipc.WantReserve: true} {
			q.Want = ipc.LookupWant(want)
			release := make([]uint64, 1)
			b.Run(fmt.Sprintf("hashes=%d/reserve=%v", n, reserve), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					reply := k.handleNow(&q)
					if reply.Tokens != uint32(n*testBlockTokens) {
						b.Fatalf("%+v", reply)
					}
					if release[0] = reply.Lease; reserve {
						r.agent.ledger.Release(acct, release)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/hash")
			})
		}
	}
}

package transfer

import (
	"bytes"
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/pool"
)

// TestTwoRanksTwoGroups moves blocks of two groups of different sizes, each with two shards, between engines in
// processes of their own and the pool: once with memory that is mapped, once with memory reached in the process.
func TestTwoRanksTwoGroups(t *testing.T) {
	for _, kind := range []cudaipc.Kind{cudaipc.KindFD, cudaipc.KindPeer} {
		const n, small, large = 32, 3000, 50_000 // blocks; bytes of a block in either group
		node := newNode(t, 1000, false)
		sp := pool.Spec{
			Fingerprint: pool.Fingerprint{9}, Identity: []byte("two"), Shards: 2,
			Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{small, small}}, {BlockTokens: 64, ShardBytes: []uint32{large, large}}},
		}
		space, err := node.pool.OpenSpace(sp)
		if err != nil {
			t.Fatal(err)
		}
		both := func(id uint64, kind Kind, from, block uint32) Job {
			a, b := section(int(from), n/2, block), section(int(from), n/2, block)
			b.Group = 1
			return Job{ID: id, Kind: kind, Epoch: 1, Event: 0, Step: 1, Revoke: cudaipc.None, Sections: []Section{a, b}}
		}
		var engines []devicetest.Engine
		var workers []*Worker
		done := make(chan Completion, 4)
		for rank := range 2 {
			e := devicetest.HostEngine(t, devicetest.Spec{Regions: []int64{n * small, n * large}, Events: 1}, kind)
			im, err := e.Import(cudaipc.PeerID(100 + rank))
			if err != nil {
				t.Fatal(err)
			}
			if err := node.host.Import(im); err != nil {
				t.Fatal(err)
			}
			w, err := Start(Config{
				Device: node.host, Peer: im.Peer, Slots: node.pool, Space: space, Spec: sp, Shard: uint8(rank), Lanes: node.lanes,
				Layout: Layout{[]GroupLayout{
					{n, []Segment{{Region: 1, Offset: 0, Stride: small, Bytes: 1000}, {Region: 1, Offset: 1000, Stride: small, Bytes: small - 1000}}},
					{n, []Segment{{Region: 2, Offset: 0, Stride: 1000, Bytes: 1000}, {Region: 2, Offset: n * 1000, Stride: large - 1000, Bytes: large - 1000}}},
				}},
				Complete: func(c Completion) { done <- c },
			})
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			engines, workers = append(engines, e), append(workers, w)
		}
		do := func(rank int, op devicetest.Op) []byte {
			t.Helper()
			data, err := engines[rank].Do(op)
			if err != nil {
				t.Fatal(err)
			}
			return data
		}
		finish := func(rank int, j Job, want pool.Status) {
			t.Helper()
			if err := workers[rank].Submit(j); err != nil {
				t.Fatal(err)
			}
			for i, status := range (<-done).Status {
				if status != want {
					t.Fatalf("rank %d, job %d, block %d: status %d, want %d", rank, j.ID, i, status, want)
				}
			}
		}
		for rank := range 2 {
			for r := range cudaipc.RegionID(2) {
				do(rank, devicetest.Op{Kind: devicetest.LaunchFill, Region: r + 1, Len: n * []int64{small, large}[r], Seed: uint64(10*rank) + uint64(r)})
			}
			do(rank, devicetest.Op{Kind: devicetest.SetStep, Step: 1})
			do(rank, devicetest.Op{Kind: devicetest.Record})
			finish(rank, both(1, Save, 0, 0), pool.OK)
			if rank == 0 {
				finish(0, both(2, Load, 0, n/2), pool.Missing) // an entry with one rank missing is not there
			}
		}
		for rank := range 2 {
			finish(rank, both(3, Load, 0, n/2), pool.OK)
			compareHalves(t, do(rank, devicetest.Op{Kind: devicetest.Read, Region: 1, Len: n * small}))
			second := do(rank, devicetest.Op{Kind: devicetest.Read, Region: 2, Len: n * large})
			compareHalves(t, second[:n*1000])
			compareHalves(t, second[n*1000:])
		}
	}
}

// compareHalves: the second half was loaded from what the first half was saved as.
func compareHalves(t *testing.T, p []byte) {
	t.Helper()
	if half := len(p) / 2; !bytes.Equal(p[:half], p[half:]) {
		t.Fatal("the blocks that were loaded are not those that were saved")
	}
}

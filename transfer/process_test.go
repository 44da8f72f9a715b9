package transfer

import (
	"bytes"
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/pool"
)

// A space of two groups and two shards. A block of the first group lies in one stretch that the
// layout names in two segments, one of the second in two places far apart.
const (
	rankBlocks   = 32
	small, large = 3000, 50_000 // bytes of a block of either group
)

func twoGroups() (pool.Spec, Layout) {
	spec := pool.Spec{
		Fingerprint: pool.Fingerprint{9}, Identity: []byte("two"), Shards: 2,
		Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{small, small}},
			{BlockTokens: 64, ShardBytes: []uint32{large, large}}},
	}
	return spec, Layout{[]GroupLayout{
		{rankBlocks, []Segment{{Region: 1, Offset: 0, Stride: small, Bytes: 1000},
			{Region: 1, Offset: 1000, Stride: small, Bytes: small - 1000}}},
		{rankBlocks, []Segment{{Region: 2, Offset: 0, Stride: 1000, Bytes: 1000},
			{Region: 2, Offset: rankBlocks * 1000, Stride: large - 1000, Bytes: large - 1000}}},
	}}
}

// rank is an engine in a process of its own and its worker.
type rank struct {
	t      *testing.T
	engine devicetest.Engine
	worker *Worker
	done   chan Completion
}

func (n *node) rank(t *testing.T, number int, kind cudaipc.Kind) *rank {
	t.Helper()
	r := &rank{t: t, done: make(chan Completion, 1)}
	r.engine = devicetest.HostEngine(t,
		devicetest.Spec{Regions: []int64{rankBlocks * small, rankBlocks * large}, Events: 1}, kind)
	im, err := r.engine.Import()
	if err != nil {
		t.Fatal(err)
	}
	spec, layout := twoGroups()
	space, err := n.pool.OpenSpace(spec)
	if err != nil {
		t.Fatal(err)
	}
	r.worker, err = Start(Config{
		Peer: devicetest.Import(t, n.host, im), Slots: n.pool, Space: space, Spec: spec, Lanes: n.lanes,
		Held: []Held{{uint8(number), layout}}, Complete: func(c Completion) { r.done <- c },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.worker.Close)
	return r
}

func (r *rank) do(op devicetest.Op) []byte {
	r.t.Helper()
	data, err := r.engine.Do(op)
	if err != nil {
		r.t.Fatal(err)
	}
	return data
}

// finish moves half of the blocks of both groups, from engine block on, after step 1.
func (r *rank) finish(kind Kind, block uint32, want pool.Status) {
	r.t.Helper()
	first, second := section(0, rankBlocks/2, block), section(0, rankBlocks/2, block)
	second.Group = 1
	job := Job{ID: 1, Kind: kind, Epoch: 1, Event: 0, Step: 1, Revoke: cudaipc.None, Sections: []Section{first, second}}
	if err := r.worker.Submit(job); err != nil {
		r.t.Fatal(err)
	}
	for i, status := range (<-r.done).Status {
		if status != want {
			r.t.Fatalf("kind %d, block %d: status %d, want %d", kind, i, status, want)
		}
	}
}

// TestTwoRanksTwoGroups moves blocks between two engines in processes of their own and the pool:
// once with memory that is mapped, once with memory reached in the process.
func TestTwoRanksTwoGroups(t *testing.T) {
	for _, kind := range []cudaipc.Kind{cudaipc.KindFD, cudaipc.KindPeer} {
		n := newNode(t, 1000)
		ranks := []*rank{n.rank(t, 0, kind), n.rank(t, 1, kind)}
		for i, r := range ranks {
			r.do(devicetest.Op{Kind: devicetest.LaunchFill, Region: 1, Len: rankBlocks * small, Seed: uint64(i)})
			r.do(devicetest.Op{Kind: devicetest.LaunchFill, Region: 2, Len: rankBlocks * large, Seed: uint64(i + 10)})
			r.do(devicetest.Op{Kind: devicetest.SetStep, Step: 1})
			r.do(devicetest.Op{Kind: devicetest.Record})
			r.finish(Save, 0, pool.OK)
			if i == 0 {
				r.finish(Load, rankBlocks/2, pool.Missing) // an entry with one rank missing is not there
			}
		}
		for _, r := range ranks {
			r.finish(Load, rankBlocks/2, pool.OK)
			second := r.do(devicetest.Op{Kind: devicetest.Read, Region: 2, Len: rankBlocks * large})
			compareHalves(t, r.do(devicetest.Op{Kind: devicetest.Read, Region: 1, Len: rankBlocks * small}))
			compareHalves(t, second[:rankBlocks*1000])
			compareHalves(t, second[rankBlocks*1000:])
		}
	}
}

// compareHalves: the second half was loaded from what the first half was saved as.
func compareHalves(t *testing.T, p []byte) {
	t.Helper()
	if half := len(p) / 2; !bytes.Equal(p[:half], p[half:]) {
		t.Fatal("the blocks that were loaded have other bytes than were saved")
	}
}

package dram_test

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/advisor"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/trace"
	"github.com/kvagent/kvagent/trace/tracetest"
)

const (
	neighbourPool  = 30_000 // blocks
	neighbourFlood = 24     // blocks that the other engine stores for each request, as many as that has on average
)

// neighbours are two engines of one pool: one serves the conversation trace, and the other stores
// blocks that nobody asks for.
type neighbours struct {
	p     *dram.Pool
	t     testing.TB
	now   time.Time
	asked int
	found int
}

func newNeighbours(t testing.TB) *neighbours {
	n := &neighbours{t: t, now: time.Unix(0, 0)}
	clock := func() time.Time { return n.now }
	var err error
	n.p, err = dram.Open(dram.Options{
		Bytes: neighbourPool << 10, Virtual: true, Advisor: advisor.New(evict.NewHazard(), clock), HashSeed: 1,
		Clock: clock,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.p.Close() })
	spec := pool.Spec{Shards: 1, Groups: []pool.Group{{BlockTokens: 512, ShardBytes: []uint32{1024}}}}
	if _, err := n.p.OpenSpace(spec); err != nil {
		t.Fatal(err)
	}
	return n
}

func (n *neighbours) owner(name string, blocks int64) pool.Owner {
	if blocks == 0 {
		return 0
	}
	o, err := n.p.OpenOwner(name)
	if err != nil {
		n.t.Fatal(err)
	}
	n.p.SetBudget(o, blocks<<10)
	return o
}

func (n *neighbours) store(o pool.Owner, h pool.Hashes) {
	b := pool.Batch{
		Epoch: 1, Owner: o, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
	}
	n.p.Reserve(&b)
	n.p.Commit(b.Slots, 1, b.Status)
}

// serve looks a prompt up and stores it.
func (n *neighbours) serve(o pool.Owner, r *trace.Request) {
	n.now = time.Unix(0, 0).Add(time.Duration(r.Timestamp) * time.Millisecond)
	h := numbered(r.HashIDs)
	n.found += n.p.Prefix(0, 0, h)
	n.asked += h.N
	n.store(o, h)
}

func numbered(ids []uint64) pool.Hashes {
	blob := make([]byte, len(ids)*pool.MaxHashLen)
	for i, id := range ids {
		binary.LittleEndian.PutUint64(blob[i*pool.MaxHashLen:], id+1)
	}
	return pool.Chain(blob, pool.MaxHashLen)
}

// TestNeighbourWithABudget plays the trace beside an engine that stores as much and finds nothing:
// a budget for that one gives most of what it took back.
func TestNeighbourWithABudget(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a trace")
	}
	requests, err := trace.Read(tracetest.Conversation(t), 0)
	if err != nil {
		t.Fatal(err)
	}
	share := map[string]float64{}
	for _, c := range []struct {
		name        string
		flood       bool
		other, self int64 // budgets, blocks
	}{
		{name: "alone"}, {name: "beside a flood", flood: true},
		{name: "beside a flood with a budget of a tenth", flood: true, other: neighbourPool / 10},
		{name: "alone, with a budget of half", self: neighbourPool / 2},
		{name: "alone, with a budget of all", self: neighbourPool},
	} {
		n := newNeighbours(t)
		self, other := n.owner("conversations", c.self), n.owner("flood", c.other)
		for i := range requests {
			n.serve(self, &requests[i])
			if c.flood {
				n.store(other, numbered(sequence(1<<40+uint64(i)*neighbourFlood, neighbourFlood)))
			}
		}
		share[c.name] = float64(n.found) / float64(n.asked)
		s := n.p.Stats()
		t.Logf("%-40s found %.4f of %d blocks; evicted %d, of them %d for a budget; refused %d; %+v", c.name,
			share[c.name], n.asked, s.Evicted, s.Owners.Evicted, s.Owners.Refused, s.Owners.Each)
		for _, o := range s.Owners.Each {
			if o.Bytes > o.Budget {
				t.Errorf("%s: %+v", c.name, o)
			}
		}
	}
	free, flooded, kept := share["alone"], share["beside a flood"], share["beside a flood with a budget of a tenth"]
	if kept-flooded < (free-flooded)/2 {
		t.Errorf("found alone %.4f, beside a flood %.4f, with a budget for that %.4f: want half of the loss back, "+
			"or more", free, flooded, kept)
	}
}

func sequence(first, n uint64) (ids []uint64) {
	for i := range n {
		ids = append(ids, first+i)
	}
	return ids
}

package tier

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// storm is two nodes with local tiers and a shared one, all with faults, and workers that save,
// look up, reserve, load, release and reset. Content follows from the key, the node that computed
// it and the number of its resets: on that node, a block from before its last reset is as wrong as
// a damaged one.
type storm struct {
	t      *testing.T
	seed   uint64
	nodes  [2]*stormNode
	stores []*fault.Store
	wrong  atomic.Int64
	loads  atomic.Int64
}

type stormNode struct {
	*node
	turn   sync.RWMutex // held to write while the space is reset
	resets byte         // below 128
	number byte
}

const stormSteps = 700 // of each worker

// TestStorm runs a storm and checks that no load has wrong bytes and nothing is left.
func TestStorm(t *testing.T) {
	s := &storm{t: t, seed: rand.Uint64()}
	if text := os.Getenv("KVAGENT_SEED"); text != "" {
		var err error
		s.seed, err = strconv.ParseUint(text, 10, 64)
		check(t, err)
	}
	t.Logf("KVAGENT_SEED=%d", s.seed)
	shared := s.faulty(pooltest.NewShelf(), 0)
	quick := Tier{AskWithin: 20 * time.Millisecond, FetchWithin: 50 * time.Millisecond,
		PutWithin: 50 * time.Millisecond,
		FoundFor:  200 * time.Millisecond, AbsentFor: 20 * time.Millisecond, BreakFirst: 5 * time.Millisecond,
		BreakLast: 20 * time.Millisecond, BreakAfter: 3}
	for i := range s.nodes {
		disk, far := quick, quick
		own := pooltest.NewShelf()
		disk.Name, disk.Store, disk.Local, disk.Write = "disk", prompt{s.faulty(own, uint64(i+1)),
			own}, true, OnSecondUse
		far.Name, far.Store, far.Write = "shared", shared, OnSave
		n := newNode(t, 250, 2, Options{
			State: filepath.Join(t.TempDir(), "resets"), EpochEvery: 20 * time.Millisecond,
			Log: func(string, string, error) {}, PrefetchBytes: 64 << 10,
		}, disk, far)
		s.nodes[i] = &stormNode{node: n, number: byte(i)}
	}
	var workers sync.WaitGroup
	for k := range 6 {
		workers.Go(func() {
			r := rand.New(rand.NewPCG(s.seed, uint64(k)))
			for range stormSteps {
				s.step(r, s.nodes[k%2])
			}
		})
	}
	workers.Wait()
	hits := [2]uint64{}
	for i, n := range s.nodes {
		n.waitFor("all is settled", func(r *pool.TierReport) bool { return r.Promises == 0 })
		r := n.Report()
		hits[0], hits[1] = hits[0]+r.Tiers[0].Hits, hits[1]+r.Tiers[1].Hits
		t.Logf("node %d: %+v", i, r)
	}
	for _, f := range s.stores {
		f.Switch(false)
	}
	one, other := s.nodes[0], s.nodes[1]
	one.waitFor("both nodes agree on the name", func(*pool.TierReport) bool {
		return one.StoredAs(one.spec.Fingerprint) == other.StoredAs(one.spec.Fingerprint)
	})
	for _, n := range s.nodes { // blocks that lack a shard stay until their room is needed
		n.flush()
	}
	t.Logf("%d blocks loaded and compared", s.loads.Load())
	if s.wrong.Load() != 0 {
		t.Errorf("%d blocks had wrong bytes", s.wrong.Load())
	}
	if hits[0] == 0 || hits[1] == 0 || s.loads.Load() == 0 {
		t.Errorf("hits %v, loads %d: the storm proves nothing", hits, s.loads.Load())
	}
}

func (s *storm) faulty(below pool.Store, n uint64) pool.Store {
	f, err := fault.New(below, fault.Every(s.seed+n, 0.03))
	check(s.t, err)
	check(s.t, f.SetRate(fault.Full, 0.0003)) // a full store is left alone for a second, and nothing would happen
	s.stores = append(s.stores, f)
	return f
}

// prompt is a local store: its Exists answers from memory, whatever else fails.
type prompt struct {
	pool.Store
	index pool.Store
}

func (p prompt) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	return p.index.Exists(ctx, keys, status)
}

func (s *storm) step(r *rand.Rand, n *stormNode) {
	h := chain(fmt.Sprint("c", r.IntN(12)), 24)
	h = h.Slice(0, 1+r.IntN(h.N))
	switch k := r.IntN(100); {
	case k < 35:
		n.turn.RLock()
		n.saveTagged(h, n.spec.Shards-k/33) // now and then the worker of the other shard saves nothing
		n.turn.RUnlock()
	case k < 45:
		n.Prefix(n.space, 0, h)
		n.Exists(n.space, 0, h, make([]bool, h.N))
	case k < 97:
		n.ask(h, time.Duration(r.IntN(2000))*time.Microsecond)
		s.reserve(r, n, h)
	default:
		n.turn.Lock()
		if r.IntN(4) == 0 { // seldom, so that the nodes share something for a while
			n.resets++
			if _, err := n.ResetSpace(n.space); err != nil {
				s.t.Error(err)
			}
		}
		n.turn.Unlock()
	}
}

// reserve pins, and then loads, releases or hints.
func (s *storm) reserve(r *rand.Rand, n *stormNode, h pool.Hashes) {
	_, refs, _ := n.Pin(n.space, 0, h, int64(r.IntN(64<<10)), nil)
	switch r.IntN(6) {
	case 0:
		n.Hint(refs)
		return
	case 1:
		n.Unpin(refs)
		return
	case 2:
		done := make(chan struct{})
		cancel := n.Settle(refs, func() { close(done) })
		if cancel != nil && !cancel() {
			<-done
		}
	default:
		n.settle(refs)
	}
	n.turn.RLock()
	s.loadTagged(n, h)
	n.turn.RUnlock()
	n.Unpin(refs)
}

// tagged fills p with the content of a shard that a node computed after some of its resets.
func tagged(key *pool.Key, tag byte, p []byte) {
	content(key, p)
	for i := range p {
		p[i] ^= tag
	}
}

func (n *stormNode) tag() byte { return n.number<<7 | n.resets }

func (n *stormNode) saveTagged(h pool.Hashes, shards int) {
	for shard := range shards {
		b := n.batch(h, shard)
		n.Reserve(b)
		for i := range b.Status {
			if b.Status[i] == pool.OK {
				key, sl := n.key(b, i), &b.Slots[i]
				p := n.arena[sl.Off : sl.Off+int64(sl.Len)]
				tagged(&key, n.tag(), p)
				sl.Sum = pool.Sum(key.Seed(sl.Len), p)
			}
		}
		n.Commit(b.Slots, b.Epoch, b.Status)
	}
}

func (s *storm) loadTagged(n *stormNode, h pool.Hashes) {
	want := make([]byte, shardBytes)
	for shard := range n.spec.Shards {
		b := n.batch(h, shard)
		n.Acquire(b)
		for i := range b.Status {
			if b.Status[i] != pool.OK {
				continue
			}
			key, sl := n.key(b, i), &b.Slots[i]
			s.loads.Add(1)
			got := n.arena[sl.Off : sl.Off+int64(sl.Len)]
			tagged(&key, 0, want)
			tag := got[0] ^ want[0]
			tagged(&key, tag, want)
			if string(got) != string(want) || tag>>7 == n.number && tag != n.tag() {
				s.wrong.Add(1)
			}
		}
		n.Release(b.Slots, b.Status)
	}
}

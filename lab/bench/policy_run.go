package bench

import (
	"cmp"
	"encoding/binary"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/pool/evict/evictsim"
)

// streamMaker makes a stream when its turn comes: all of them at once take gigabytes.
type streamMaker func() *evictsim.Stream

// measurePolicies runs each stream at each capacity, as many streams at once as there are cores.
func measurePolicies(makers []streamMaker, capacities []int) ([]policyReport, error) {
	rows, errs := make([]policyReport, len(makers)*len(capacities)), make([]error, len(makers))
	runs := runsAlone
	if len(makers) > 1 {
		runs = runsAmong
	}
	var next atomic.Int64
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(makers)) {
		workers.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(makers); i = int(next.Add(1)) - 1 {
				errs[i] = measureStream(makers[i](), capacities, runs, rows[i*len(capacities):])
			}
		})
	}
	workers.Wait()
	return rows, errors.Join(errs...)
}

func measureStream(s *evictsim.Stream, capacities []int, runs int, rows []policyReport) (err error) {
	for i, c := range capacities {
		if rows[i], err = measurePolicy(s, c, runs); err != nil {
			return err
		}
	}
	return nil
}

// How often each policy is timed; of each part of the stream the least counts.
const (
	runsAlone = 25
	runsAmong = 3 // several streams: their caches are shared anyway
)

func measurePolicy(s *evictsim.Stream, capacity, runs int) (policyReport, error) {
	r := policyReport{
		Stream: s.Name, Capacity: capacity, Policies: map[string]float64{},
		LRU: evictsim.LRU(s, capacity).HitRate(), Opt: evictsim.Optimum(s, capacity).HitRate(),
		PerAccess:    policyTime(s, evict.HazardName, capacity, runs),
		PerAccessLRU: policyTime(s, evict.LRUName, capacity, runs),
	}
	for _, name := range evict.Names {
		hits, err := poolHits(s, name, capacity)
		if err != nil {
			return r, err
		}
		r.Policies[name] = float64(hits) / float64(max(1, s.Looked()))
	}
	r.HitRate = r.Policies[evict.DefaultName]
	r.BelowLRU = r.LRU - r.HitRate
	return r, nil
}

// policyTime returns the time of a simulation with a policy per block looked up, ns.
func policyTime(s *evictsim.Stream, eviction string, capacity, runs int) int64 {
	least := evictsim.Run(s, evict.Named(eviction), capacity)
	for range runs - 1 {
		least = least.Least(evictsim.Run(s, evict.Named(eviction), capacity))
	}
	return least.PerAccess().Nanoseconds()
}

// poolHits replays a stream through look-up, reservation and commit.
func poolHits(s *evictsim.Stream, eviction string, capacity int) (hits int, err error) {
	// A slab holds one block, so that exactly as many fit as asked for.
	slab := int64(dram.MinSlabBytes)
	for slab*int64(capacity) < dram.MinBytes {
		slab *= 2
	}
	clock := &streamClock{}
	p, err := dram.Open(dram.Options{
		Bytes: slab * int64(capacity), SlabBytes: slab, Virtual: true, Policy: evict.Named(eviction), Clock: clock.now,
		HashSeed: cmp.Or(s.HashSeed, defaultPolicySeed),
	})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	space, err := p.OpenSpace(pool.Spec{
		Identity: []byte("policy"), Shards: 1,
		Groups: []pool.Group{{BlockTokens: evictsim.BlockTokens, ShardBytes: []uint32{uint32(slab)}}},
	})
	if err != nil {
		return 0, err
	}
	for i := range s.Requests {
		clock.at.Store(s.Requests[i].Millis)
		hits += playRequest(p, space, s.Requests[i].Blocks)
	}
	return hits, nil
}

// playRequest looks a prompt up, stores what is missing, and returns the blocks that were there.
func playRequest(p *dram.Pool, space pool.SpaceID, blocks []uint32) int {
	h := policyHashes(blocks)
	n := p.Prefix(space, 0, h)
	b := pool.Batch{Space: space, Epoch: 1, Hashes: h.Slice(n, h.N)}
	if n > 0 {
		b.Parent = h.At(n - 1)
	}
	b.Status, b.Slots = make([]pool.Status, b.Hashes.N), make([]pool.Slot, b.Hashes.N)
	p.Reserve(&b)
	p.Commit(b.Slots, b.Epoch, b.Status)
	return n
}

func policyHashes(blocks []uint32) pool.Hashes {
	blob := make([]byte, 0, 8*len(blocks))
	for _, id := range blocks {
		blob = binary.LittleEndian.AppendUint64(blob, uint64(id))
	}
	return pool.Chain(blob, 8)
}

// streamClock is the time of the request being played; the pool's goroutines read it too.
type streamClock struct{ at atomic.Int64 } // ms

func (c *streamClock) now() time.Time { return time.UnixMilli(c.at.Load()) }

package dram

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"

	"github.com/kvagent/kvagent/pagefault"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/advisor"
	"github.com/kvagent/kvagent/pool/evict"
)

// The process that is killed reports its actions on descriptor 3, in records of 16 bytes: a letter,
// the number of a space, and the number of a block, which begins its hash.
const (
	// StormEnv names the pool's file to a process that is a storm, and stormSeed its seed.
	StormEnv  = "KVAGENT_TEST_STORM"
	stormSeed = "KVAGENT_TEST_STORM_SEED"

	saidCommitted = 'c' // after Commit had returned
	saidEvicted   = 'e' // before the pool lets a block go
	saidResetting = 'b' // before ResetSpace
	saidReset     = 'r' // after ResetSpace had returned
	saidFull      = 'f' // the pool is full, the storm begins
	saidTaken     = 't' // slabs that went to another class so far, instead of a block

	stormPool    = 16 << 20 // bytes
	stormSlab    = 64 << 10
	stormWorkers = 4
	stormRecord  = 16
	resetSpace   = 2 // of stormSpecs: the one that is reset
)

// stormSpecs are one with one shard, one with two, and one that is reset now and then.
func stormSpecs() []pool.Spec {
	var out []pool.Spec
	for i, bytes := range [][]uint32{{4096}, {3000, 6000}, {1000}} {
		s := pool.Spec{
			Identity: fmt.Appendf(nil, "storm %d", i), Shards: len(bytes),
			Groups: []pool.Group{{BlockTokens: 16, ShardBytes: bytes}},
		}
		s.Fingerprint[0] = byte(i + 1)
		out = append(out, s)
	}
	return out
}

func openStorm(path string, policy advisor.Policy) (*Pool, error) {
	p, err := Open(Options{Bytes: stormPool, SlabBytes: stormSlab, Path: path, Advisor: asAdvisor(policy, nil)})
	if err != nil {
		return nil, err
	}
	for i, s := range stormSpecs() {
		if id, err := p.OpenSpace(s); err != nil || int(id) != i {
			return nil, errors.Join(err, fmt.Errorf("space %d is %d", i, id))
		}
	}
	return p, nil
}

// stormHash is the hash of a block: its number, and what makes it 32 bytes long.
func stormHash(number uint64) []byte {
	b := binary.LittleEndian.AppendUint64(nil, number)
	for i := range uint64(3) {
		b = binary.LittleEndian.AppendUint64(b, (number+i+1)*0x9e3779b97f4a7c15)
	}
	return b
}

// stormBytes fills a shard with what belongs to its block.
func stormBytes(b []byte, number uint64, shard uint8) {
	var unit [8]byte
	binary.LittleEndian.PutUint64(unit[:], number*31+uint64(shard))
	for i := 0; i < len(b); i += 8 {
		copy(b[i:], unit[:])
	}
}

// Storm runs until it is killed.
func Storm() {
	seed, err := strconv.ParseUint(os.Getenv(stormSeed), 10, 64)
	if err != nil {
		panic(err)
	}
	s := &storm{out: os.NewFile(3, "to the parent"), seed: seed}
	var policy advisor.Policy = evict.NewLRU()
	if seed%2 == 0 {
		policy = evict.NewHazard()
	}
	if s.p, err = openStorm(os.Getenv(StormEnv), &teller{Policy: policy, storm: s}); err != nil {
		panic(err)
	}
	var all sync.WaitGroup
	for w := range stormWorkers {
		all.Go(func() { s.work(w) })
	}
	all.Wait()
}

type storm struct {
	p    *Pool
	out  *os.File
	seed uint64
	full sync.Once
	mu   sync.Mutex // one record after the other
}

// teller reports the blocks that the pool drops.
type teller struct {
	advisor.Policy
	storm *storm
}

func (t *teller) Remove(entries []uint32) {
	c := t.storm.p.core
	for _, e := range entries {
		r := &c.recs.All[e]
		for i, sp := range c.spaces {
			if c.realms[r.ident.realm()].space == sp {
				t.storm.say(saidEvicted, i, r.hash.A)
			}
		}
	}
	t.Policy.Remove(entries)
}

func (s *storm) say(what byte, space int, numbers ...uint64) {
	b := make([]byte, 0, stormRecord*len(numbers))
	for _, n := range numbers {
		b = append(b, what, byte(space), 0, 0, 0, 0, 0, 0)
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.out.Write(b); err != nil {
		os.Exit(1) // the parent has gone
	}
}

// work saves chains and loads them again.
func (s *storm) work(worker int) {
	rng := rand.New(rand.NewPCG(s.seed, uint64(worker)))
	next := s.seed<<32 | uint64(worker)<<28
	var chains [][2]uint64 // space and first number
	for turn := 0; ; turn++ {
		space, n := rng.IntN(3), 1+rng.IntN(24)
		if s.seed%4 >= 2 { // the load shifts, so that slabs are taken all the time
			space = turn / 4 % 2
		}
		s.save(space, next, n)
		chains = append(chains, [2]uint64{uint64(space), next})
		next += uint64(n)
		for range 2 {
			c := chains[rng.IntN(len(chains))]
			s.load(int(c[0]), c[1], 1+rng.IntN(8))
		}
		if worker == 0 && turn%16 == 15 {
			s.say(saidResetting, resetSpace, 0)
			if _, err := s.p.ResetSpace(resetSpace); err != nil {
				panic(err)
			}
			s.say(saidReset, resetSpace, 0)
		}
		st := s.p.Stats()
		if worker == 0 {
			s.say(saidTaken, 0, st.Reassigned)
		}
		if st.Used > stormPool*9/10 {
			s.full.Do(func() { s.say(saidFull, 0, 0) })
		}
	}
}

func (s *storm) batch(space int, shard uint8, first uint64, n int) pool.Batch {
	var blob []byte
	for i := range uint64(n) {
		blob = append(blob, stormHash(first+i)...)
	}
	return pool.Batch{
		Space: pool.SpaceID(space), Shard: shard, Epoch: s.p.Epoch(pool.SpaceID(space)),
		Hashes: pool.Chain(blob, pool.MaxHashLen),
		Status: make([]pool.Status, n), Slots: make([]pool.Slot, n),
	}
}

// save reserves all shards first: of a block that is not being written the pool may drop the shards
// that are there already.
func (s *storm) save(space int, first uint64, n int) {
	spec := stormSpecs()[space]
	var shards []pool.Batch
	for shard := range spec.Shards {
		b := s.batch(space, uint8(shard), first, n)
		s.p.Reserve(&b)
		shards = append(shards, b)
	}
	whole := make([]int, n)
	for shard, b := range shards {
		s.fill(&b, first, uint8(shard))
		s.p.Commit(b.Slots, b.Epoch, b.Status)
		for i, status := range b.Status {
			if status == pool.OK {
				whole[i]++
			}
		}
	}
	var done []uint64
	for i := range whole {
		if whole[i] == spec.Shards {
			done = append(done, first+uint64(i))
		}
	}
	s.say(saidCommitted, space, done...)
}

func (s *storm) fill(b *pool.Batch, first uint64, shard uint8) {
	for i := range b.Slots {
		if b.Status[i] != pool.OK {
			continue
		}
		at := s.p.base[b.Slots[i].Off:][:b.Slots[i].Len]
		if pagefault.Guard(s.p.base, nil, func() { stormBytes(at, first+uint64(i), shard) }) != nil {
			s.p.Probe(b.Slots[i])
			b.Status[i] = pool.Busy
			continue
		}
		k := pool.Key{Space: stormSpecs()[b.Space].Fingerprint, Shard: shard, Hash: pool.MakeHash(b.Hashes.At(i))}
		b.Slots[i].Sum = pool.Sum(k.Seed(b.Slots[i].Len), at)
	}
}

func (s *storm) load(space int, first uint64, n int) {
	spec := stormSpecs()[space]
	for shard := range spec.Shards {
		b := s.batch(space, uint8(shard), first, n)
		s.p.Acquire(&b)
		for i := range b.Slots {
			if b.Status[i] != pool.OK {
				continue
			}
			want := make([]byte, b.Slots[i].Len)
			stormBytes(want, first+uint64(i), uint8(shard))
			equal, at := false, s.p.base[b.Slots[i].Off:][:b.Slots[i].Len]
			if pagefault.Guard(s.p.base, nil, func() { equal = bytes.Equal(want, at) }) != nil {
				s.p.Probe(b.Slots[i])
				b.Status[i] = pool.Corrupt
			} else if !equal {
				panic("wrong bytes in the storm itself")
			}
		}
		s.p.Release(b.Slots, b.Status)
	}
}

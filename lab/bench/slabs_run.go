package bench

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
)

const (
	slabsMostTurn = 4    // blocks that one turn of a conversation adds at most
	slabsStamp    = 64   // bytes of a stamp
	slabsStamps   = 4    // in a block
	slabsFull     = 0.99 // of the pool, from which the first phase ends
	slabsMixed    = 2    // times the pool is stored in the last phase
)

// slabsBench is a run.
type slabsBench struct {
	settings *slabsSettings
	pool     *dram.Pool
	arena    []byte
	clock    *streamClock // a turn takes a millisecond
	rng      *rand.Rand
	models   []*slabsModel
	phase    *slabPhase
	slept    time.Duration // in reservations of this phase
}

// slabsModel is a model whose blocks have one size.
type slabsModel struct {
	number   uint64
	bytes    int64 // of a block
	space    pool.SpaceID
	longest  int // blocks of a conversation before another takes its place
	talks    []slabsTalk
	finished []slabsTalk
}

// slabsTalk is a conversation.
type slabsTalk struct {
	number uint64
	blocks int
}

// measureSlabs plays the three phases.
func measureSlabs(s *slabsSettings) (r slabsReport, err error) {
	clock := &streamClock{}
	p, err := dram.Open(dram.Options{
		Bytes: s.pool, SlabBytes: s.slab, Policy: evict.Named(s.eviction), Clock: clock.now,
		HashSeed: cmp.Or(s.seed, defaultSlabsSeed),
	})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	if err := p.Populated(); err != nil {
		return r, err
	}
	info := p.Info()
	r = slabsReport{
		PoolBytes: info.Bytes, SlabBytes: info.SlabBytes, SlotBytes: s.sizes,
		Conversations: s.conversations, Eviction: s.eviction, Seed: s.seed,
	}
	b := &slabsBench{settings: s, pool: p, clock: clock, rng: rand.New(rand.NewPCG(s.seed, 0))}
	b.arena, _ = p.Arena()
	for i, n := range s.sizes {
		if err := b.addModel(uint64(i), n); err != nil {
			return r, err
		}
	}
	r.Phases = append(r.Phases,
		b.play("fill", b.models[:1], func(ph *slabPhase) bool {
			return float64(p.Stats().Used) >= slabsFull*float64(info.Bytes) || ph.StoredBytes >= info.Bytes
		}),
		b.play("second", b.models[1:], func(ph *slabPhase) bool {
			return ph.StoredBytes >= s.store*int64(len(b.models)-1)
		}),
		b.play("mixed", b.models, func(ph *slabPhase) bool { return ph.StoredBytes >= slabsMixed*info.Bytes }))
	r.Checked, r.Wrong = b.check()
	return r, nil
}

func (b *slabsBench) addModel(number uint64, bytes int64) error {
	m := &slabsModel{number: number, bytes: bytes, talks: make([]slabsTalk, b.settings.conversations)}
	m.longest = max(2*slabsMostTurn, 2*int(b.pool.Info().Bytes/bytes)/len(m.talks))
	for i := range m.talks {
		m.talks[i].number = uint64(i)
	}
	spec := pool.Spec{
		Identity: fmt.Appendf(nil, "bench slabs %d", number), Shards: 1,
		Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{uint32(bytes)}}},
	}
	spec.Fingerprint[0] = byte(number + 1)
	var err error
	m.space, err = b.pool.OpenSpace(spec)
	b.models = append(b.models, m)
	return err
}

// play continues random conversations of random models until a phase has ended.
func (b *slabsBench) play(name string, models []*slabsModel, over func(*slabPhase) bool) slabPhase {
	ph := slabPhase{Name: name}
	b.phase, b.slept = &ph, 0
	before := b.pool.Stats()
	for turns := 0; !over(&ph) && turns < maxPolicyBlocks; turns++ {
		b.turn(models[b.rng.IntN(len(models))])
	}
	after := b.pool.Stats()
	ph.EvictedBytes = int64(after.EvictedBytes - before.EvictedBytes)
	ph.MovedBytes = int64(after.MovedBytes - before.MovedBytes)
	ph.MovedRatio = float64(ph.MovedBytes) / float64(max(1, ph.StoredBytes))
	ph.SlabsGiven = after.Reassigned - before.Reassigned
	ph.EvictedRatio = float64(ph.EvictedBytes) / float64(max(1, ph.StoredBytes))
	ph.ReserveMeanUs = float64(b.slept.Nanoseconds()) / 1e3 / float64(max(1, ph.Reservations))
	return ph
}

// turn looks a conversation up, and stores what is missing of it and the blocks of this turn.
func (b *slabsBench) turn(m *slabsModel) {
	b.clock.at.Add(1)
	i := b.rng.IntN(len(m.talks))
	t := &m.talks[i]
	if t.blocks >= m.longest {
		m.finished = append(m.finished, *t)
		*t = slabsTalk{number: t.number + uint64(len(m.talks))}
	}
	t.blocks += 1 + b.rng.IntN(slabsMostTurn)
	h := m.hashes(t)
	n := b.pool.Prefix(m.space, 0, h)
	batch := m.batch(h.Slice(n, h.N))
	if n > 0 {
		batch.Parent = h.At(n - 1)
	}
	began := time.Now()
	b.pool.Reserve(&batch)
	took := time.Since(began)
	b.slept += took
	b.phase.Reservations++
	b.phase.ReserveWorstUs = max(b.phase.ReserveWorstUs, float64(took.Nanoseconds())/1e3)
	for i, slot := range batch.Slots {
		if batch.Status[i] == pool.OK {
			stamp(b.arena[slot.Off:][:slot.Len], batch.Hashes.At(i))
		}
	}
	b.pool.Commit(batch.Slots, batch.Epoch, batch.Status)
	for _, status := range batch.Status {
		switch status {
		case pool.OK:
			b.phase.StoredBytes += m.bytes
		case pool.Busy:
			b.phase.Refused++
		}
	}
}

func (m *slabsModel) batch(h pool.Hashes) pool.Batch {
	return pool.Batch{
		Space: m.space, Epoch: 1, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
	}
}

// hashes returns the chain of a conversation.
func (m *slabsModel) hashes(t *slabsTalk) pool.Hashes {
	blob := make([]byte, 0, t.blocks*pool.MaxHashLen)
	for i := range uint64(t.blocks) {
		for word := range uint64(pool.MaxHashLen / 8) {
			blob = binary.LittleEndian.AppendUint64(blob, (m.number<<56|t.number<<24|i<<2|word)*0x9e3779b97f4a7c15)
		}
	}
	return pool.Chain(blob, pool.MaxHashLen)
}

// stamps returns the places of a block that are written and compared: its beginning, its end, and
// some between.
func stamps(n int) (at [slabsStamps]int) {
	for i := range at {
		at[i] = i * (n - slabsStamp) / (slabsStamps - 1)
	}
	return at
}

// stamp writes a block's expected content.
func stamp(block, hash []byte) {
	for _, at := range stamps(len(block)) {
		recoverBytes(block[at:at+slabsStamp], hash)
	}
}

func stamped(block, hash []byte) bool {
	var want [slabsStamp]byte
	recoverBytes(want[:], hash)
	for _, at := range stamps(len(block)) {
		if !bytes.Equal(block[at:at+slabsStamp], want[:]) {
			return false
		}
	}
	return true
}

// check compares all blocks that are stored.
func (b *slabsBench) check() (checked, wrong int) {
	for _, m := range b.models {
		for _, t := range append(m.finished, m.talks...) {
			if t.blocks == 0 {
				continue
			}
			batch := m.batch(m.hashes(&t))
			b.pool.Acquire(&batch)
			for i, slot := range batch.Slots {
				if batch.Status[i] != pool.OK {
					continue
				}
				checked++
				if !stamped(b.arena[slot.Off:][:slot.Len], batch.Hashes.At(i)) {
					wrong++
				}
			}
			b.pool.Release(batch.Slots, batch.Status)
		}
	}
	return checked, wrong
}

package pooltest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// walker applies random operations to a pool that is always full, records what it holds and what
// it has stored, and compares each answer with that.
type walker struct {
	*fixture
	r       *rand.Rand
	models  []*fixture
	writing []*work
	reading []*work
	pins    [][]pool.Ref
	held    map[int64]holding // by offset
	holds   map[pool.Ref]int  // pins, readers and writers of each entry
	shards  map[pool.Key]shard
}

// shard is a shard that is stored or being written, and has not been dropped. It may have been
// evicted unless its entry is held.
type shard struct {
	ref    pool.Ref
	stored bool
}

// work is a batch whose slots the walker holds.
type work struct {
	at    *fixture
	batch *pool.Batch
}

type holding struct {
	end    int64
	ref    pool.Ref
	shard  uint8
	writer bool
	n      int
}

const anyOrderSteps = 4000

func testAnyOrder(t *testing.T, open Open) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	f := start(t, open, Options{Bytes: 512 << 10, SlabBytes: 16 << 10}, model("one", 1, 1024))
	w := &walker{
		fixture: f, r: rand.New(rand.NewPCG(seed, 0)), models: []*fixture{f},
		held: map[int64]holding{}, holds: map[pool.Ref]int{}, shards: map[pool.Key]shard{},
	}
	for _, spec := range []pool.Spec{model("three", 2, 700, 1024, 3000), model("wide", 1, 9000)} {
		w.models = append(w.models, f.with(spec))
	}
	for i := range anyOrderSteps {
		w.step()
		if i%50 == 0 {
			f.check()
		}
	}
	w.finish()
}

func (w *walker) step() {
	switch n := w.r.IntN(100); {
	case n < 35:
		w.reserve()
	case n < 60 && len(w.writing) > 0:
		w.commit(w.r.IntN(len(w.writing)))
	case n < 70:
		w.acquire()
	case n < 82 && len(w.reading) > 0:
		w.release(w.r.IntN(len(w.reading)))
	case n < 90:
		m := w.models[w.r.IntN(len(w.models))]
		_, refs, _ := m.Pin(m.space, w.group(m), w.chain(), int64(w.r.IntN(64<<10)), nil)
		for _, ref := range refs {
			w.holds[ref]++
		}
		w.pins = append(w.pins, refs)
	case n < 98 && len(w.pins) > 0:
		w.unpin(w.r.IntN(len(w.pins)))
	case n == 99 && w.r.IntN(4) == 0:
		m := w.models[w.r.IntN(len(w.models))]
		if _, err := m.ResetSpace(m.space); err != nil {
			w.t.Fatal(err)
		}
		maps.DeleteFunc(w.shards, func(k pool.Key, _ shard) bool { return k.Space == m.spec.Fingerprint })
	}
}

func (w *walker) unpin(i int) {
	for _, ref := range w.pins[i] {
		w.holds[ref]--
	}
	w.Unpin(w.pins[i])
	w.pins = slices.Delete(w.pins, i, i+1)
}

func (w *walker) group(m *fixture) uint8 { return uint8(w.r.IntN(len(m.spec.Groups))) }

func (w *walker) chain() pool.Hashes {
	h := fork(w.r)
	return h.Slice(w.r.IntN(h.N), h.N)
}

func (w *walker) reserve() {
	m := w.models[w.r.IntN(len(w.models))]
	h := fork(w.r)
	from := w.r.IntN(h.N)
	var parent []byte
	if from > 0 {
		parent = h.At(from - 1)
	}
	b := m.batch(h.Slice(from, h.N), uint8(w.r.IntN(m.spec.Shards)), parent)
	b.Group = w.group(m)
	m.Reserve(b)
	for i, s := range b.Status {
		w.reserved(m.key(b, i), s, b.Slots[i].Ref)
	}
	w.take(b, true)
	m.write(b)
	w.writing = append(w.writing, &work{at: m, batch: b})
}

// reserved compares the answer for one shard with what is stored and being written.
func (w *walker) reserved(key pool.Key, s pool.Status, ref pool.Ref) {
	have, known := w.shards[key]
	switch {
	case s == pool.Busy:
	case s == pool.Exists && known && have.stored:
	case s == pool.InProgress && known && !have.stored:
	case s == pool.OK && (!known || have.ref != ref && w.holds[have.ref] == 0):
		w.shards[key] = shard{ref: ref}
	default:
		w.t.Fatalf("reserve: status %d, entry %d, of a shard that is %+v (known: %v), with %d holds", s, ref, have,
			known, w.holds[have.ref])
	}
}

// take records the slots of a batch, which must not be held otherwise.
func (w *walker) take(b *pool.Batch, writer bool) {
	for i, s := range b.Status {
		if s != pool.OK {
			continue
		}
		slot := b.Slots[i]
		if slot.Off < 0 || slot.Off+int64(slot.Len) > int64(len(w.arena)) {
			w.t.Fatalf("slot %+v is outside of the arena", slot)
		}
		have, shared := w.held[slot.Off]
		if shared && (writer || have.writer || have.ref != slot.Ref || have.shard != slot.Shard) {
			w.t.Fatalf("slot %+v was given to a second holder", slot)
		}
		for off, h := range w.held {
			if off != slot.Off && off < slot.Off+int64(slot.Len) && slot.Off < h.end {
				w.t.Fatalf("slot %+v lies over one that is held at %d", slot, off)
			}
		}
		w.holds[slot.Ref]++
		w.held[slot.Off] = holding{slot.Off + int64(slot.Len), slot.Ref, slot.Shard, writer, have.n + 1}
	}
}

func (w *walker) leave(b *pool.Batch, slots []pool.Slot) {
	for _, s := range slots {
		if s.Ref == 0 {
			continue
		}
		w.holds[s.Ref]--
		h := w.held[s.Off]
		if h.n--; h.n > 0 {
			w.held[s.Off] = h
			continue
		}
		delete(w.held, s.Off)
	}
}

func (w *walker) commit(i int) {
	job := w.writing[i]
	w.writing = append(w.writing[:i], w.writing[i+1:]...)
	m, b := job.at, job.batch
	m.verify(b) // the slots must not have been overwritten meanwhile
	for j := range b.Status {
		if b.Status[j] == pool.OK && w.r.IntN(10) == 0 {
			b.Status[j] = pool.Status(19)
		}
	}
	slots, given := slices.Clone(b.Slots), slices.Clone(b.Status)
	m.Commit(b.Slots, b.Epoch, b.Status)
	w.leave(b, slots)
	for j, s := range b.Status {
		switch current := b.Epoch == m.Epoch(m.space); {
		case s == pool.OK && !current:
			w.t.Fatal("committed in an epoch that is over")
		case s != pool.OK && given[j] == pool.OK && current:
			w.t.Fatalf("status %d: a half-written entry was evicted", s)
		}
		key := m.key(b, j)
		if have, known := w.shards[key]; !known || have.ref != slots[j].Ref || slots[j].Ref == 0 {
			continue
		}
		if w.shards[key] = (shard{slots[j].Ref, true}); s != pool.OK {
			delete(w.shards, key)
		}
	}
}

func (w *walker) acquire() {
	m := w.models[w.r.IntN(len(w.models))]
	b := m.batch(w.chain(), uint8(w.r.IntN(m.spec.Shards)), nil)
	b.Group = w.group(m)
	m.Acquire(b)
	m.verify(b)
	for i, s := range b.Status {
		key := m.key(b, i)
		for key.Shard = 0; s == pool.OK && int(key.Shard) < m.spec.Shards; key.Shard++ {
			if have := w.shards[key]; !have.stored || have.ref != b.Slots[i].Ref {
				w.t.Fatalf("entry %d is acquired, and its shard %d is %+v", b.Slots[i].Ref, key.Shard, have)
			}
		}
	}
	w.take(b, false)
	w.reading = append(w.reading, &work{at: m, batch: b})
}

func (w *walker) release(i int) {
	job := w.reading[i]
	w.reading = append(w.reading[:i], w.reading[i+1:]...)
	job.at.verify(job.batch) // also when it was dropped meanwhile
	slots := append([]pool.Slot(nil), job.batch.Slots...)
	for j := range job.batch.Status {
		if job.batch.Status[j] == pool.OK && w.r.IntN(30) == 0 {
			job.batch.Status[j] = pool.Corrupt
			maps.DeleteFunc(w.shards, func(_ pool.Key, s shard) bool { return s.ref == slots[j].Ref })
		}
	}
	w.Release(job.batch.Slots, job.batch.Status)
	w.leave(job.batch, slots)
}

func (w *walker) finish() {
	for len(w.writing) > 0 {
		w.commit(0)
	}
	for len(w.reading) > 0 {
		w.release(0)
	}
	for len(w.pins) > 0 {
		w.unpin(0)
	}
	if s := w.Stats(); s.Pinned != 0 || s.PinnedEntries != 0 {
		w.t.Fatalf("nothing is held, and yet: %+v", s)
	}
	if len(w.held) != 0 {
		w.t.Fatal("the test's own ledger is not empty: ", fmt.Sprint(w.held))
	}
	for _, m := range w.models[1:] {
		if _, err := m.ResetSpace(m.space); err != nil {
			w.t.Fatal(err)
		}
	}
	w.empty()
}

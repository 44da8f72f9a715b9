package events

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

const (
	blockTokens = 4
	chains      = 12
	chainBlocks = 24
)

// view is what one router knows: it counts stores and removes, and refuses what no router allows.
type view struct {
	t      *testing.T
	name   string
	stored map[string]ipc.EventRun // by hash: a run of one block
	in     map[string]held         // by hash: the media
	left   func(h string) bool     // reports whether a block may have gone and come again; nil: it may
	most   int
	ended  bool
	whole  bool
	got    int // messages
}

func (v *view) receive(msg any) {
	m := msg.(*ipc.BlockEvents)
	v.got++
	v.whole = m.State == ipc.EventsWhole
	if v.ended || m.State == ipc.EventsRefused {
		v.t.Fatalf("%s: state %d, ended %v", v.name, m.State, v.ended)
	}
	if m.State == ipc.EventsVoid {
		clear(v.stored)
		clear(v.in)
		return
	}
	blocks, gone := map[string]bool{}, map[string]bool{}
	for _, r := range m.Runs {
		parent := string(r.Parent)
		for i := range len(r.Hashes) / int(r.HashLen) {
			h := string(r.Hashes[i*int(r.HashLen) : (i+1)*int(r.HashLen)])
			blocks[h] = true
			medium := held(1) << (r.Medium - ipc.MediumMemory)
			stored := v.in[h]&medium != 0
			if r.Kind == ipc.EventRemoved {
				if !stored {
					v.t.Fatalf("%s: removed what is not stored: %x", v.name, h)
				}
				if v.in[h] &^= medium; v.in[h] != 0 {
					continue
				}
				for child, one := range v.stored {
					if string(one.Parent) == h {
						v.t.Fatalf("%s: %x is removed before %x, which follows it", v.name, h, child)
					}
				}
				delete(v.stored, h)
				delete(v.in, h)
				gone[h] = true
				continue
			}
			if stored {
				v.t.Fatalf("%s: stored twice: %x", v.name, h)
			}
			if gone[h] && v.left != nil && !v.left(h) {
				v.t.Fatalf("%s: %x moved, and was told to be gone first", v.name, h)
			}
			v.in[h] |= medium
			if _, known := v.stored[parent]; parent != "" && !known {
				v.t.Fatalf("%s: %x is stored before its parent", v.name, h)
			}
			stride := len(r.Tokens) * int(r.HashLen) / len(r.Hashes)
			v.stored[h] = ipc.EventRun{
				Parent: []byte(parent), Tokens: r.Tokens[i*stride : (i+1)*stride], Extra: r.Extra,
			}
			parent = h
		}
	}
	if len(blocks) > v.most {
		v.t.Fatalf("%s: %d blocks, asked for %d", v.name, len(blocks), v.most)
	}
}

// world is a pool, the ledger of its space, routers, and a random run of them.
type world struct {
	t     *testing.T
	rng   *rand.Rand
	pool  *dram.Pool
	disk  *disk
	id    pool.SpaceID
	space *space
	views map[uint64]*view
	last  uint64
	said  map[string]bool // blocks whose tokens were said
	gone  map[string]bool // blocks that were not held at some look, since all was told
	notes []pool.Change
}

func newWorld(t *testing.T, seed uint64, l limits) *world {
	p, err := dram.Open(dram.Options{Bytes: 128 << 10, SlabBytes: 4 << 10, Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	id, err := p.OpenSpace(pool.Spec{Shards: 1, Groups: []pool.Group{{BlockTokens: 4, ShardBytes: []uint32{1024}}}})
	if err != nil {
		t.Fatal(err)
	}
	p.Watch(id)
	under := &disk{id: id, stored: map[string]bool{}}
	rules := &lookup.Space{ID: id, Groups: []lookup.Group{{BlockTokens: blockTokens}}}
	d := &Desk{
		memory: p, media: [media]pool.Journal{p, under}, spaces: map[pool.SpaceID]*space{},
	}
	d.spaces[id] = newSpace(d, rules, l)
	return &world{
		t: t, rng: rand.New(rand.NewPCG(seed, 1)), pool: p, disk: under, id: id, views: map[uint64]*view{},
		space: d.spaces[id], said: map[string]bool{}, gone: map[string]bool{},
	}
}

// disk is a journal of a set.
type disk struct {
	id     pool.SpaceID
	stored map[string]bool
	notes  []pool.Change
	lost   bool
}

func (d *disk) Watch(pool.SpaceID)       {}
func (d *disk) Changed() <-chan struct{} { return nil }

func (d *disk) Changes([]pool.Change) (all []pool.Change, lost bool) {
	all, lost = d.notes, d.lost
	d.notes, d.lost = nil, false
	return all, lost
}

func (d *disk) Holds(_ pool.SpaceID, _ uint8, h pool.Hashes, present []bool) bool {
	for i := range h.N {
		present[i] = d.stored[string(h.At(i))]
	}
	return true
}

func (d *disk) note(h string) {
	d.notes = append(d.notes, pool.Change{Space: d.id, Hash: pool.MakeHash([]byte(h))})
}

// drop drops blocks, and notes each or only that something has changed.
func (d *disk) drop(which func(h string) bool, quietly bool) {
	for h := range d.stored {
		if which(h) {
			delete(d.stored, h)
			if d.lost = d.lost || quietly; !quietly {
				d.note(h)
			}
		}
	}
}

// write writes to the disk what memory has of a part of a prompt.
func (w *world) write() {
	h, _ := w.part()
	present := make([]bool, h.N)
	w.pool.Holds(w.id, 0, h, present)
	for i := range h.N {
		if present[i] {
			w.disk.stored[string(h.At(i))] = true
			w.disk.note(string(h.At(i)))
		}
	}
}

// chain is prompt number n. Odd ones share the first half of the one before.
func chain(n int) pool.Hashes {
	var blob []byte
	for i := range chainBlocks {
		of := n
		if i < chainBlocks/2 {
			of &^= 1
		}
		var h [8]byte
		binary.LittleEndian.PutUint32(h[:], uint32(of))
		binary.LittleEndian.PutUint32(h[4:], uint32(i))
		blob = append(blob, h[:]...)
	}
	return pool.Chain(blob, 8)
}

// tokensOf follow from the hash, as the extra does.
func tokensOf(h []byte) (b []byte) {
	for i := range blockTokens {
		b = binary.LittleEndian.AppendUint32(b, uint32(i)+binary.LittleEndian.Uint32(h)*1000+
			binary.LittleEndian.Uint32(h[4:]))
	}
	return b
}

func extraOf(h []byte) []byte {
	if n := binary.LittleEndian.Uint32(h); n%4 == 0 {
		return []byte{byte(n)}
	}
	return nil
}

// part returns a random part of a random prompt, and the hash before it.
func (w *world) part() (h pool.Hashes, parent []byte) {
	h = chain(w.rng.IntN(chains))
	from := w.rng.IntN(h.N) * w.rng.IntN(2)
	to := from + 1 + w.rng.IntN(h.N-from)
	if from > 0 {
		parent = h.At(from - 1)
	}
	return h.Slice(from, to), parent
}

// look notes which blocks are gone when the space may look them up.
func (w *world) look() {
	held := w.truth(func([]byte) bool { return true })
	for h := range w.said {
		if held[h] == 0 {
			w.gone[h] = true
		}
	}
}

func (w *world) learn() {
	w.look()
	h, parent := w.part()
	for i := range h.N { // extras differ within a chain: a message for each
		w.space.learn(&ipc.BlockTokens{
			Parent: parent, HashLen: 8, Hashes: h.At(i), Tokens: tokensOf(h.At(i)), Extra: extraOf(h.At(i)),
		}, false)
		parent = h.At(i)
		w.said[string(parent)] = true
	}
}

func (w *world) save() {
	h, parent := w.part()
	b := pool.Batch{
		Space: w.id, Epoch: w.pool.Epoch(w.id), Parent: parent, Hashes: h, Status: make([]pool.Status, h.N),
		Slots: make([]pool.Slot, h.N),
	}
	w.pool.Reserve(&b)
	slots, status := b.Slots[:0], b.Status[:0]
	for i, s := range b.Status {
		if s == pool.OK {
			slots, status = append(slots, b.Slots[i]), append(status, s)
		}
	}
	w.pool.Commit(slots, b.Epoch, status)
}

// pump does what the desk does when the pool has noted something.
func (w *world) pump() {
	w.look()
	var lost bool
	if w.notes, lost = w.pool.Changes(w.notes); lost {
		w.space.desk.compareAll()
	} else {
		w.space.desk.changed(w.notes)
	}
	if w.disk.notes, lost = w.disk.Changes(nil); lost {
		w.space.desk.compareAll()
	} else {
		w.space.desk.changed(w.disk.notes)
	}
	w.disk.notes = nil
}

func (w *world) ask(session uint64, v *view, anew bool) {
	if v.most = 1 + w.rng.IntN(9); anew {
		clear(v.stored)
		clear(v.in)
	}
	if !w.space.next(session, 1, v.most, anew, v.receive) {
		w.t.Fatal("refused")
	}
}

func (w *world) anySession() (uint64, *view) {
	if len(w.views) == 0 {
		return 0, nil
	}
	all := slices.Sorted(maps.Keys(w.views))
	n := all[w.rng.IntN(len(all))]
	return n, w.views[n]
}

func (w *world) step() {
	n, v := w.anySession()
	switch k := w.rng.IntN(100); {
	case k < 22:
		w.save()
	case k < 30:
		w.write()
	case k < 31:
		w.disk.drop(func(string) bool { return w.rng.IntN(3) == 0 }, w.rng.IntN(2) == 0)
	case k < 45:
		w.learn()
	case k < 60:
		w.pump()
	case k < 62:
		if _, err := w.pool.ResetSpace(w.id); err != nil {
			w.t.Fatal(err)
		}
		w.disk.drop(func(string) bool { return true }, true)
		clear(w.said)
	case k < 65 && len(w.views) < 5:
		w.last++
		v = &view{t: w.t, name: fmt.Sprint("view ", w.last), stored: map[string]ipc.EventRun{}, in: map[string]held{}}
		v.left = func(h string) bool { return w.gone[h] }
		w.views[w.last] = v
		w.ask(w.last, v, false)
	case v == nil:
	case k < 66:
		v.ended = true
		w.space.desk.Leave(n)
		delete(w.views, n)
	case k < 67:
		w.ask(n, v, true)
	default:
		w.ask(n, v, false)
	}
}

// settle gives every view what there is to tell, without anything else happening.
func (w *world) settle() {
	w.pump()
	for n, v := range w.views {
		for v.whole = false; !v.whole; {
			had := v.got
			if w.ask(n, v, false); v.got == had {
				break // nothing to tell
			}
		}
	}
	clear(w.gone)
}

// truth is what routers must know: blocks held with all before them, whose tokens are known, and
// where.
func (w *world) truth(known func(h []byte) bool) map[string]held {
	all := map[string]held{}
	for n := range chains {
		h := chain(n)
		present := make([]bool, h.N)
		w.pool.Holds(w.id, 0, h, present)
		for i := range h.N {
			var in held
			if present[i] {
				in |= 1
			}
			if w.disk.stored[string(h.At(i))] {
				in |= 2
			}
			if in == 0 || !known(h.At(i)) {
				break
			}
			all[string(h.At(i))] = in
		}
	}
	return all
}

func (w *world) check(known func(h []byte) bool) {
	want := w.truth(known)
	for _, v := range w.views {
		if len(v.stored) != len(want) {
			w.t.Fatalf("%s knows %d blocks, %d are held", v.name, len(v.stored), len(want))
		}
		for h, one := range v.stored {
			if want[h] == 0 || want[h] != v.in[h] || string(one.Tokens) != string(tokensOf([]byte(h))) ||
				string(one.Extra) != string(extraOf([]byte(h))) {
				w.t.Fatalf("%s: block %x is held in %b, told in %b; tokens %v, extra %v", v.name, h, want[h], v.in[h],
					one.Tokens, one.Extra)
			}
		}
	}
}

// TestViewsEqualThePool: whatever happens, no view ever gets an event that a router could not use,
// and each equals the pool once nothing happens any more: with slow subscribers, a log that
// overflows, and a pool that evicts all the time.
func TestViewsEqualThePool(t *testing.T) {
	for seed := range uint64(10) {
		l := defaultLimits()
		if seed%2 == 1 {
			l.log = 6
		}
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			w := newWorld(t, seed, l)
			for range 40 {
				for range 50 {
					w.step()
				}
				w.settle()
				w.check(func(h []byte) bool { return w.said[string(h)] })
			}
			if gaps := w.space.desk.Report().Gaps; gaps > 0 {
				t.Errorf("%d gaps with a log of %d changes", gaps, l.log)
			}
		})
	}
}

// TestViewsWithLittleRoom is the same with a ledger that forgets blocks which are not held, and
// that has no room for all: what it has forgotten is not told, and everything else is.
func TestViewsWithLittleRoom(t *testing.T) {
	for seed := range uint64(10) {
		l := limits{blocks: 60 + int(seed%40), idle: 1 + int(seed%8), log: 16}
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			w := newWorld(t, seed, l)
			for range 40 {
				for range 50 {
					w.step()
				}
				w.settle()
				one := w.space.ledgers[0]
				w.check(func(h []byte) bool {
					n := one.get(h)
					return n != 0 && one.at(n).known
				})
				if len(one.index) > l.blocks || len(one.log) > l.log {
					t.Fatalf("%d blocks, log of %d", len(one.index), len(one.log))
				}
			}
			if _, err := w.pool.ResetSpace(w.id); err != nil {
				t.Fatal(err)
			}
			w.disk.drop(func(string) bool { return true }, true)
			w.pump()
			if one := w.space.ledgers[0]; len(one.index) > l.idle || len(one.extras) > l.idle {
				t.Errorf("%d blocks and %d extras are left of nothing", len(one.index), len(one.extras))
			}
		})
	}
}

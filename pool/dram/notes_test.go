package dram

import (
	"slices"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// saveChain stores a chain of one shard without its bytes.
func saveChain(t testing.TB, p *Pool, id pool.SpaceID, h pool.Hashes) {
	t.Helper()
	b := pool.Batch{
		Space: id, Epoch: p.Epoch(id), Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
	}
	p.Reserve(&b)
	p.Commit(b.Slots, b.Epoch, b.Status)
	if i := slices.IndexFunc(b.Status, func(s pool.Status) bool { return s != pool.OK }); i >= 0 {
		t.Fatalf("block %d: status %d", i, b.Status[i])
	}
}

// taken returns the notes, and whether the channel said that there are some.
func taken(p *Pool) (all []pool.Change, lost, said bool) {
	select {
	case <-p.Changed():
		said = true
	default:
	}
	all, lost = p.Changes(nil)
	return all, lost, said
}

func openNoted(t *testing.T, blocks int) (p *Pool, watched, other pool.SpaceID) {
	p, err := Open(Options{Bytes: int64(blocks) << 10, SlabBytes: 4 << 10, Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	second := keptSpec
	second.Fingerprint, second.Identity = pool.Fingerprint{2}, []byte("other")
	watched, other = openSpec(t, p, keptSpec), openSpec(t, p, second)
	p.Watch(watched)
	return p, watched, other
}

// TestNotesNameWhatComesAndGoes: every entry of a watched space is noted when it is stored and when
// it is evicted, in that order, and none of another space.
func TestNotesNameWhatComesAndGoes(t *testing.T) {
	p, watched, other := openNoted(t, 64)
	saveChain(t, p, other, randomChain(nil, 1, 16))
	if all, lost, said := taken(p); len(all) != 0 || lost || said {
		t.Fatalf("a space that is not watched: %d notes, lost %v, said %v", len(all), lost, said)
	}
	want := map[pool.Hash]int{}
	for number := range 8 {
		h := randomChain(nil, 10+number, 16)
		saveChain(t, p, watched, h)
		for i := range h.N {
			want[pool.MakeHash(h.At(i))] = 0
		}
	}
	all, lost, said := taken(p)
	if lost || !said {
		t.Fatalf("lost %v, said %v", lost, said)
	}
	for _, c := range all {
		if _, saved := want[c.Hash]; !saved || c.Space != watched {
			t.Fatalf("noted %+v, which was not saved", c)
		}
		want[c.Hash]++
	}
	for h, noted := range want {
		var present [1]bool
		if open := p.Holds(watched, 0, pool.Chain(h.Bytes[:h.Len], int(h.Len)), present[:]); !open {
			t.Fatal("the space is open, and Holds says it is not")
		}
		if held := present[0]; held && noted != 1 || !held && noted != 2 {
			t.Errorf("an entry that is held (%v) was noted %d times", held, noted)
		}
	}
}

// TestNotesAreLostAtResets: a reset, a close and more notes than there is room for are told as one.
func TestNotesAreLostAtResets(t *testing.T) {
	for name, end := range map[string]func(p *Pool, id pool.SpaceID) error{
		"reset": func(p *Pool, id pool.SpaceID) error { _, err := p.ResetSpace(id); return err },
		"close": func(p *Pool, id pool.SpaceID) error { return p.CloseSpace(id) },
		"full": func(p *Pool, id pool.SpaceID) error {
			for number := range maxNotes/2/16 + 4 {
				saveChain(t, p, id, randomChain(nil, 100+number, 16))
			}
			return nil
		},
	} {
		p, id, other := openNoted(t, 64)
		saveChain(t, p, id, randomChain(nil, 1, 16))
		if _, err := p.ResetSpace(other); err != nil {
			t.Fatal(err)
		}
		if _, lost, _ := taken(p); lost {
			t.Fatalf("%s: lost before", name)
		}
		if err := end(p, id); err != nil {
			t.Fatal(err)
		}
		all, lost, said := taken(p)
		if !lost || !said || len(all) > maxNotes {
			t.Errorf("%s: lost %v, said %v, %d notes", name, lost, said, len(all))
		}
		if open := p.Holds(id, 0, pool.Hashes{Len: 1}, nil); open == (name == "close") {
			t.Errorf("%s: Holds says open %v", name, open)
		}
		p.Sweep()
		if all, lost, _ := taken(p); lost || len(all) != 0 {
			t.Errorf("%s: the sweep notes %d entries that were lost before", name, len(all))
		}
	}
}

// BenchmarkNotes is BenchmarkSave in a full pool with and without a watched space.
func BenchmarkNotes(b *testing.B) {
	for _, watched := range []bool{false, true} {
		b.Run(map[bool]string{false: "off", true: "on"}[watched], func(b *testing.B) {
			p := filled(b, 64<<10)
			if watched {
				p.Watch(0)
			}
			number := 1 << 20
			var list []pool.Change
			save := func() {
				saveChain(b, p, 0, randomChain(nil, number, benchChainLen))
				number++
				list, _ = p.Changes(list)
			}
			for range 1 << 10 {
				save()
			}
			report := reportCPU(b, benchChainLen)
			for b.Loop() {
				save()
			}
			report()
		})
	}
}

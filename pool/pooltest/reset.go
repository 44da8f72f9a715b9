package pooltest

import (
	"errors"
	"slices"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

func testReset(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1024))
	g := f.with(model("other", 1, 1024))
	h := chain("a", 10)
	f.store(h, nil)
	g.store(h, nil)
	held := f.batch(h.Slice(0, 2), 0, nil)
	f.Acquire(held)
	epoch, err := f.ResetSpace(f.space)
	if err != nil || epoch != 2 || f.Epoch(f.space) != 2 {
		t.Fatalf("reset: epoch %d, %v; want 2", epoch, err)
	}
	f.wantPrefix(h, 0, "found after a reset")
	g.wantPrefix(h, 10, "another space was reset")
	if s := f.Stats(); s.Used != 12<<10 || s.Entries != 10 || s.Pinned != 2<<10 {
		t.Fatalf(
			"after a reset: %d bytes used, %d pinned, %d entries; want 12288, 2048, 10", s.Used, s.Pinned, s.Entries,
		)
	}
	f.store(h, nil)
	f.wantPrefix(h, 10, "stored again in the new epoch")
	f.verify(held)
	f.Release(held.Slots, held.Status)
	if s := f.Stats(); s.Used != 20<<10 {
		t.Fatalf("%d bytes used when the last pin of the old epoch ended, want 20480", s.Used)
	}
	if _, err := f.ResetSpace(99); err == nil {
		t.Fatal("reset of a space that is not open")
	}
	if _, err := g.ResetSpace(g.space); err != nil {
		t.Fatal(err)
	}
	f.empty()
}

func testResetCommit(t *testing.T, open Open) {
	f := start(t, open, small, model("two", 1, 1024, 1024))
	h := chain("a", 3)
	f.save(h, 0, nil)
	b := f.batch(h, 1, nil)
	f.Reserve(b)
	f.write(b)
	if _, err := f.ResetSpace(f.space); err != nil {
		t.Fatal(err)
	}
	if s := f.Stats(); s.Used != 6<<10 {
		t.Fatalf("%d bytes used, want 6144: slots were taken from their writer", s.Used)
	}
	again := f.batch(h, 1, nil)
	f.Reserve(again)
	f.wantStatus(again, pool.OK, "the new epoch does not wait for the old one")
	f.Commit(b.Slots, b.Epoch, b.Status)
	f.wantStatus(b, pool.Stale, "a save computed before a reset was committed after it")
	f.write(again)
	f.Commit(again.Slots, b.Epoch, again.Status)
	f.wantStatus(again, pool.Stale, "committed with an epoch that is over")
	f.empty()
}

func testCorrupt(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1024))
	h := chain("a", 5)
	f.store(h, nil)
	b, second := f.batch(h, 0, nil), f.batch(h, 0, nil)
	f.Acquire(b)
	f.Acquire(second)
	b.Status[2] = pool.Corrupt
	f.Release(b.Slots, b.Status)
	f.wantPrefix(h, 2, "an entry that did not verify is still found")
	f.check()
	f.verify(second)
	second.Status[2] = pool.Corrupt
	f.Release(second.Slots, second.Status)
	if s := f.Stats(); s.Dropped != 1 || s.Pinned != 0 {
		t.Fatalf("%d dropped, %d bytes pinned; want 1, 0", s.Dropped, s.Pinned)
	}
	f.store(h.Slice(2, 3), h.At(1))
	f.wantPrefix(h, 5, "stored again")
	f.empty()
}

func testTwice(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1024))
	h := chain("a", 2)
	b := f.batch(h, 0, nil)
	f.Reserve(b)
	f.write(b)
	f.Commit(b.Slots, b.Epoch, b.Status)
	f.Commit(b.Slots, b.Epoch, b.Status)
	one, two := f.batch(h, 0, nil), f.batch(h, 0, nil)
	f.Acquire(one)
	f.Acquire(two)
	f.Release(one.Slots, one.Status)
	f.Release(one.Slots, one.Status)
	if s := f.Stats(); s.PinnedEntries != 2 {
		t.Fatalf("%d entries pinned, want 2: a pin handed back twice took someone else's", s.PinnedEntries)
	}
	f.Release(two.Slots, two.Status)
	f.Unpin([]pool.Ref{0, 1, 1 << 40, ^pool.Ref(0)}) // not held by any pin
	f.empty()
}

func testSpaces(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 2, 1000, 3000))
	if again := f.open(model("one", 2, 1000, 3000)); again != f.space {
		t.Fatalf("the same spec is space %d, then %d", f.space, again)
	}
	if other := f.open(model("two", 1, 1000)); other == f.space {
		t.Fatal("two specs have one space")
	}
	shape := model("one", 2, 1000, 2000)
	if _, err := f.OpenSpace(shape); !errors.Is(err, pool.ErrIdentity) {
		t.Fatalf("one identity with another shape: %v, want ErrIdentity", err)
	}
	clash := model("three", 1, 1000)
	clash.Fingerprint = f.spec.Fingerprint
	if _, err := f.OpenSpace(clash); !errors.Is(err, pool.ErrIdentity) {
		t.Fatalf("one fingerprint, two identities: %v, want ErrIdentity", err)
	}
	if _, err := f.OpenSpace(model("huge", 1, 1<<30)); !errors.Is(err, pool.ErrTooLarge) {
		t.Fatalf("a shard larger than the pool: %v, want ErrTooLarge", err)
	}
	for name, bad := range map[string]pool.Spec{
		"no shards": model("s0", 1), "257 shards": model("s257", 1, slices.Repeat([]uint32{1}, pool.MaxShards+1)...),
		"no groups": model("g0", 0, 100),
		"17 groups": model("g17", 17, 100), "empty shard": model("e", 1, 100, 0),
		"fewer sizes than shards": {Identity: []byte("f"), Fingerprint: [16]byte{1}, Shards: 2, Groups: []pool.Group{
			{ShardBytes: []uint32{1}},
		}},
	} {
		if _, err := f.OpenSpace(bad); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if f.Epoch(f.space) != 1 || f.Epoch(999) != 0 {
		t.Fatalf("epochs %d and %d, want 1 and 0", f.Epoch(f.space), f.Epoch(999))
	}
	f.empty()
}

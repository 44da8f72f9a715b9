package pooltest

import (
	"testing"

	"github.com/kvagent/kvagent/pool"
)

func testInvisible(t *testing.T, open Open) {
	f := start(t, open, small, model("three", 1, 1000, 1000, 2000))
	h := chain("a", 4)
	for _, shard := range []uint8{2, 0, 1} {
		f.wantPrefix(h, 0, "entry visible with one rank missing")
		if f.count(h) != 0 {
			t.Fatal("entry visible with one rank missing: Exists")
		}
		b := f.batch(h, 0, nil)
		f.Acquire(b)
		f.wantStatus(b, pool.Missing, "entry visible with one rank missing: Acquire")
		if n, refs, _ := f.Pin(f.space, 0, h, 1<<30, nil); n != 0 || len(refs) != 0 {
			t.Fatal("entry visible with one rank missing: Pin")
		}
		b = f.batch(h, shard, nil)
		f.Reserve(b)
		f.wantPrefix(h, 0, "entry visible before it is committed")
		f.write(b)
		f.Commit(b.Slots, b.Epoch, b.Status)
	}
	f.wantPrefix(h, 4, "all shards are committed")
	for shard := range uint8(3) {
		b := f.batch(h, shard, nil)
		f.Acquire(b)
		f.wantStatus(b, pool.OK, "all shards are committed")
		f.verify(b)
		f.Release(b.Slots, b.Status)
	}
	f.empty()
}

func testReserveStatus(t *testing.T, open Open) {
	f := start(t, open, small, model("two", 1, 1000, 1000))
	h := chain("a", 2)
	first := f.batch(h, 0, nil)
	f.Reserve(first)
	f.wantStatus(first, pool.OK, "nothing is stored")
	again := f.batch(h, 0, nil)
	copy(again.Slots, first.Slots) // of an earlier batch, as a caller's memory may be
	f.Reserve(again)
	f.wantStatus(again, pool.InProgress, "being written")
	if again.Slots[0] != (pool.Slot{}) || again.Slots[1] != (pool.Slot{}) {
		t.Fatalf(
			"slots %+v of shards that were not reserved: a second commit would end someone else's writing", again.Slots,
		)
	}
	other := f.batch(h, 1, nil)
	f.Reserve(other)
	f.wantStatus(other, pool.OK, "the other shard is free")
	f.write(first)
	f.Commit(first.Slots, first.Epoch, first.Status)
	f.Reserve(again)
	f.wantStatus(again, pool.Exists, "this shard is committed")
	f.write(other)
	f.Commit(other.Slots, other.Epoch, other.Status)
	f.Reserve(other)
	f.wantStatus(other, pool.Exists, "all shards are committed")

	bad := f.batch(h, 2, nil)
	f.Reserve(bad)
	f.wantStatus(bad, pool.Invalid, "no such shard")
	bad = f.batch(h, 0, nil)
	bad.Group = 1
	f.Reserve(bad)
	f.wantStatus(bad, pool.Invalid, "no such group")
	bad.Group, bad.Space = 0, 99
	f.Reserve(bad)
	f.wantStatus(bad, pool.Invalid, "no such space")
	f.Acquire(bad)
	f.wantStatus(bad, pool.Invalid, "no such space")
	bad = f.batch(chain("b", 2), 0, nil)
	bad.Epoch++
	f.Reserve(bad)
	f.wantStatus(bad, pool.Stale, "an epoch that is not the space's")
	double := pool.Chain(append(chain("c", 1).Blob, chain("c", 1).Blob...), hashLen)
	b := f.batch(double, 0, nil)
	f.Reserve(b)
	if b.Status[0] != pool.OK || b.Status[1] != pool.InProgress {
		t.Fatalf("one hash twice in a batch: %v", b.Status)
	}
	f.Commit(b.Slots, b.Epoch, []pool.Status{pool.Busy, pool.Busy})
	f.empty()
}

func testGiveUp(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1000))
	h := chain("a", 3)
	b := f.batch(h, 0, nil)
	f.Reserve(b)
	f.write(b)
	f.Commit(b.Slots, b.Epoch, []pool.Status{pool.OK, pool.Status(19), pool.OK})
	if got := f.present(h); !got[0] || got[1] || !got[2] {
		t.Fatalf("a slot was given up, others committed: present %v", got)
	}
	f.wantPrefix(h, 1, "the second was given up")
	f.store(h.Slice(1, 2), h.At(0))
	f.wantPrefix(h, 3, "the second came after all")
	f.empty()
}

func testKeysDoNotMix(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 2, 1000))
	other := f.open(model("other", 2, 1000))
	short := pool.Chain([]byte{1, 2, 3, 4, 5, 6, 7, 8}, 8)
	f.store(short, nil)
	padded := pool.Chain([]byte{1, 2, 3, 4, 5, 6, 7, 8, 0}, 9)
	f.wantPrefix(short, 1, "stored")
	f.wantPrefix(padded, 0, "a longer hash that ends with a zero is another one")
	if f.Prefix(f.space, 1, short) != 0 {
		t.Fatal("found in another group")
	}
	if f.Prefix(other, 0, short) != 0 {
		t.Fatal("found in another space")
	}
	if f.Prefix(99, 0, short) != 0 || f.Prefix(f.space, 9, short) != 0 {
		t.Fatal("found in a space or group that does not exist")
	}
	f.empty()
}

func testViews(t *testing.T, open Open) {
	f := start(t, open, Options{Bytes: 2 << 20, SlabBytes: 64 << 10}, model("one", 1, 1000))
	h := chain("long", 1500) // longer than a pool looks at in one step
	f.store(h, nil)
	f.wantPrefix(h, 1500, "a long chain")
	f.wantPrefix(chain("long", 1600), 1500, "the end of a long chain")
	third := pool.Hashes{Blob: h.Blob, Len: hashLen, First: 2, Step: 3, N: 500}
	f.wantPrefix(third, 500, "every third")
	if f.count(third) != 500 {
		t.Fatal("every third: Exists")
	}
	f.wantPrefix(h.Slice(700, 1300), 600, "a slice")
	n, refs, bytes := f.Pin(f.space, 0, h, 1<<30, nil)
	if n != 1500 || len(refs) != 1500 || bytes != 1500*1024 {
		t.Fatalf("pin of a long chain: %d, %d refs, %d bytes", n, len(refs), bytes)
	}
	f.Unpin(refs)
	f.empty()
}

package pooltest

import (
	"fmt"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

func testPressure(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1024))
	h := chain("kept", 64)
	f.store(h, nil)
	_, refs, _ := f.Pin(f.space, 0, h, 1<<30, nil)
	calls, need := 0, int64(0)
	f.SetPressure(func(n int64) bool {
		calls++
		need = n
		f.Stats() // would hang under a lock
		return false
	})
	b := f.save(chain("new", 4), 0, nil)
	f.wantStatus(b, pool.Busy, "everything is pinned")
	if calls != 1 || need != 4<<10 {
		t.Fatalf("pressure called %d times, with %d bytes; want once, 4096", calls, need)
	}
	if f.Stats().Busy != 4 {
		t.Fatalf("%d refusals counted, want 4", f.Stats().Busy)
	}
	f.SetPressure(func(int64) bool {
		f.Unpin(refs[60:])
		return true
	})
	fresh := chain("new", 4)
	b = f.save(fresh, 0, nil)
	f.wantStatus(b, pool.OK, "pressure made room")
	b = f.save(chain("newer", 4), 0, fresh.At(3))
	f.wantStatus(b, pool.Busy, "a suffix must not push out its own prefix")
	f.SetPressure(nil)
	f.Unpin(refs[:60])
	f.empty()
}

// testResetUnderPressure resets a space while a reservation, a part of which has found room, asks
// for more: that part stays the caller's, who gives it back.
func testResetUnderPressure(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1024))
	h := chain("kept", 60)
	f.store(h, nil)
	_, refs, _ := f.Pin(f.space, 0, h, 1<<30, nil)
	f.SetPressure(func(int64) bool {
		if _, err := f.Pool.ResetSpace(f.space); err != nil {
			t.Error(err)
		}
		f.Unpin(refs)
		return true
	})
	b := f.batch(chain("new", 8), 0, nil)
	f.Reserve(b)
	for i, s := range b.Status {
		if want := []pool.Status{pool.OK, pool.Stale}[i/4]; s != want {
			t.Fatalf("hash %d has status %d, want %d", i, s, want)
		}
	}
	f.write(b)
	f.Commit(b.Slots, b.Epoch, b.Status)
	f.wantStatus(b, pool.Stale, "the space was reset")
	f.SetPressure(nil)
	f.empty()
}

func testPartialPressure(t *testing.T, open Open) {
	f := start(t, open, small, model("two", 1, 1024, 1024))
	f.save(chain("partial", 16), 0, nil) // rank 1 never comes
	if s := f.Stats(); s.Partial != 16 {
		t.Fatalf("%d partial entries, want 16", s.Partial)
	}
	whole := chain("whole", 16)
	f.store(whole, nil) // the pool is full
	for i := range 8 {
		f.store(chain(fmt.Sprint("new", i), 2), nil)
		f.wantPrefix(whole, 16, "partial entries go before whole ones")
	}
	if s := f.Stats(); s.Partial != 0 {
		t.Fatalf("%d partial entries are still there", s.Partial)
	}
	f.empty()
}

// testPartialChain has a chain with one block that lacks a shard: a store evicts as much of the
// chain's end as it needs, not all that follows the block.
func testPartialChain(t *testing.T, open Open) {
	f := start(t, open, small, model("two", 1, 1024, 1024))
	h := chain("holed", 32)
	f.save(h, 0, nil)
	f.save(h.Slice(0, 4), 1, nil)
	f.save(h.Slice(5, 32), 1, h.At(4))
	if s := f.Stats(); s.Entries != 31 || s.Partial != 1 || s.Used != s.Capacity {
		t.Fatalf("%d whole entries and %d partial ones in %d bytes, want 31 and 1 in %d",
			s.Entries, s.Partial, s.Used, s.Capacity)
	}
	f.save(chain("new", 2), 0, nil)
	if s := f.Stats(); s.Evicted != 2 {
		t.Fatalf("%d entries evicted for two blocks: what hangs on a partial entry went with it", s.Evicted)
	}
	f.empty()
}

func testPinBytes(t *testing.T, open Open) {
	f := start(t, open, small, model("two", 1, 1000, 2000)) // 3 KiB of slots
	h := chain("a", 5)
	f.store(h, nil)
	n, refs, bytes := f.Pin(f.space, 0, h, 10<<10, nil)
	if n != 3 || len(refs) != 3 || bytes != 9<<10 {
		t.Fatalf("pin within 10 KiB: %d entries, %d refs, %d bytes; want 3, 3, 9216", n, len(refs), bytes)
	}
	if s := f.Stats(); s.Pinned != 9<<10 || s.PinnedEntries != 3 {
		t.Fatalf("pinned %d bytes, %d entries", s.Pinned, s.PinnedEntries)
	}
	if n, _, _ := f.Pin(f.space, 0, h, -1, nil); n != 0 {
		t.Fatal("pinned beyond a cap that is used up")
	}
	f.Unpin(refs)
	f.empty()
}

func testPinned(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1024))
	h := chain("kept", 8)
	f.store(h, nil)
	_, refs, _ := f.Pin(f.space, 0, h, 1<<30, nil)
	held := f.batch(h.Slice(0, 4), 0, nil)
	f.Acquire(held)
	for i := range 300 {
		f.save(chain(fmt.Sprint("other", i), 2), 0, nil)
	}
	if f.count(h) != 8 {
		t.Fatal("a pinned entry was evicted")
	}
	f.verify(held)
	f.Release(held.Slots, held.Status)
	f.Unpin(refs)
	for i := range 300 {
		f.store(chain(fmt.Sprint("more", i), 2), nil)
	}
	if f.count(h) != 0 {
		t.Fatal("entries whose pins ended are never evicted")
	}
	f.empty()
}

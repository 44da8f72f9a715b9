package pooltest

import (
	"fmt"
	"testing"
)

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

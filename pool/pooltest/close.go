package pooltest

import (
	"fmt"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// testSweep checks that a reset hides everything at once, and that its memory is freed by Sweep, or
// earlier when it is needed.
func testSweep(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1024))
	h, fresh := chain("a", 40), chain("b", 60)
	f.store(h, nil)
	if _, err := f.Pool.ResetSpace(f.space); err != nil {
		t.Fatal(err)
	}
	f.wantPrefix(h, 0, "found after a reset")
	f.check()
	f.store(fresh, nil) // 40 and 60 blocks do not fit in 64
	f.check()
	f.Sweep()
	f.wantPrefix(fresh, 60, "a sweep dropped what was stored after the reset")
	if s := f.Stats(); s.Used != 60<<10 || s.Entries != 60 {
		t.Fatalf("after a sweep: %d bytes used, %d entries; want 61440, 60", s.Used, s.Entries)
	}
	f.empty()
}

// testClose checks that a space opened again after a close has nothing of what was stored before.
func testClose(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1024))
	h := chain("a", 10)
	f.store(h, nil)
	if _, err := f.ResetSpace(f.space); err != nil {
		t.Fatal(err)
	}
	f.store(h, nil)
	closed := f.space
	f.closeSpace(closed)
	if f.Epoch(closed) != 0 {
		t.Fatalf("epoch %d of a closed space, want 0", f.Epoch(closed))
	}
	f.wantPrefix(h, 0, "found in a closed space")
	if _, err := f.ResetSpace(closed); err == nil {
		t.Fatal("reset of a closed space")
	}
	if err := f.CloseSpace(closed); err == nil {
		t.Fatal("closed twice")
	}
	if err := f.CloseSpace(closed + 1000); err == nil {
		t.Fatal("closed a space that never was")
	}
	f.spec.FirstEpoch = 7
	if f.space = f.open(f.spec); f.space == closed {
		t.Fatal("a space was opened under the number of a closed one")
	}
	if f.Epoch(f.space) != 7 {
		t.Fatalf("epoch %d of a new space, want 7, as its spec says", f.Epoch(f.space))
	}
	f.spec.FirstEpoch = 9
	if again := f.open(f.spec); again != f.space || f.Epoch(again) != 7 {
		t.Fatalf(
			"space %d that is open was opened again: space %d, epoch %d; want it as it was, in epoch 7", f.space, again,
			f.Epoch(again),
		)
	}
	f.wantPrefix(h, 0, "opened again, and what was stored before the close is found")
	f.Sweep()
	if s := f.Stats(); s.Used != 0 || s.Entries != 0 {
		t.Fatalf("after a close: %d bytes used, %d entries; want none", s.Used, s.Entries)
	}
	f.empty()
}

// testCloseHeld checks that holders of a closed space's ID, of a pin or of a reservation neither
// see nor store anything in the space opened in its place, and do no harm when they release what
// they hold.
func testCloseHeld(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1024))
	h, late := chain("a", 4), chain("b", 4)
	f.store(h, nil)
	read, write := f.batch(h, 0, nil), f.batch(late, 0, nil)
	f.Acquire(read)
	f.Reserve(write)
	f.write(write)
	closed := f.space
	f.closeSpace(closed)
	f.space = f.open(f.spec)
	f.store(h, nil)
	f.verify(read)
	f.Commit(write.Slots, write.Epoch, write.Status)
	f.wantStatus(write, pool.Stale, "committed to a space that was closed")
	f.wantPrefix(late, 0, "stored by who wrote to the closed space")
	f.Release(read.Slots, read.Status)

	stale := f.batch(h, 0, nil)
	stale.Space = closed
	f.Reserve(stale)
	f.wantStatus(stale, pool.Invalid, "reserved in a closed space")
	f.Acquire(stale)
	for i, s := range stale.Status {
		if s != pool.Invalid && s != pool.Missing {
			t.Fatalf("hash %d acquired of a closed space: status %d", i, s)
		}
	}
	if n, refs, bytes := f.Pin(closed, 0, h, 1<<20, nil); n != 0 || len(refs) != 0 || bytes != 0 {
		t.Fatalf("%d blocks pinned of a closed space", n)
	}
	f.wantPrefix(h, 4, "the new space")
	f.Sweep()
	f.wantPrefix(h, 4, "the new space, after a sweep")
	f.empty()
}

// manySpaces is more than the spaces of which a file has records.
const manySpaces = 1200

// testManySpaces opens one space after another, stores something in each, and closes it.
func testManySpaces(t *testing.T, open Open) {
	f := start(t, open, small, model("first", 1, 1024))
	h := chain("a", 2)
	first := f.space
	for i := range manySpaces {
		f.spec = model(fmt.Sprint("space", i), 1, 1024)
		f.space = f.open(f.spec)
		f.wantPrefix(h, 0, "found in a new space")
		f.store(h, nil)
		f.wantPrefix(h, 2, "stored")
		f.closeSpace(f.space)
		if i%100 == 0 {
			f.Sweep()
			f.check()
		}
	}
	f.Sweep()
	f.space = first
	f.empty()
}

func (f *fixture) closeSpace(s pool.SpaceID) {
	f.t.Helper()
	if err := f.CloseSpace(s); err != nil {
		f.t.Fatalf("close space %d: %v", s, err)
	}
}

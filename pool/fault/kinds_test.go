package fault

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"math/bits"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// rig is a faulty store over a plain one, with a few items.
type rig struct {
	*Store
	t     *testing.T
	plain pool.Store
}

func newRig(t *testing.T, o Options) *rig {
	plain := pooltest.NewShelf()
	return &rig{wrap(t, plain, o), t, plain}
}

func (r *rig) items(n int) (items []pool.Item) {
	for i := range n {
		items = append(items, pool.Item{
			Key:  pool.Key{Space: pool.Fingerprint{1}, Hash: pool.MakeHash([]byte{byte(i + 1)})},
			Data: bytes.Repeat([]byte{byte(i + 1)}, 100), Status: 255,
		})
	}
	return items
}

func keysOf(items []pool.Item) (keys []pool.Key) {
	for i := range items {
		keys = append(keys, items[i].Key)
	}
	return keys
}

func (r *rig) stored(n int) []pool.Item {
	r.t.Helper()
	items := r.items(n)
	if err := r.plain.Put(r.t.Context(), items); err != nil {
		r.t.Fatal(err)
	}
	return items
}

func (r *rig) wantCount(k Kind, n uint64) {
	r.t.Helper()
	if got := r.Counts()[k]; got != n {
		r.t.Fatalf("%v is counted %d times, want %d", k, got, n)
	}
}

func only(k Kind, rate float64) Options { return Options{Seed: 1, Rates: map[Kind]float64{k: rate}} }

func differentBits(a, b []byte) (n int) {
	for i := range a {
		n += bits.OnesCount8(a[i] ^ b[i])
	}
	return n
}

func TestErrorDoesNothing(t *testing.T) {
	r := newRig(t, only(Error, 1))
	if err := r.Put(t.Context(), r.items(3)); !errors.Is(err, ErrInjected) {
		t.Fatalf("put: %v", err)
	}
	if n := r.Usage().Items; n != 0 {
		t.Fatalf("%d items are stored by a put that was not tried", n)
	}
	r.wantCount(Error, 1)
}

func TestLostReplyDoesEverything(t *testing.T) {
	r := newRig(t, only(LostReply, 1))
	if err := r.Put(t.Context(), r.items(3)); !errors.Is(err, ErrInjected) {
		t.Fatalf("put: %v", err)
	}
	if n := r.Usage().Items; n != 3 {
		t.Fatalf("%d items are stored, want 3", n)
	}
	r.wantCount(LostReply, 1)
}

func TestFull(t *testing.T) {
	r := newRig(t, only(Full, 0.5))
	items := r.items(100)
	if err := r.Put(t.Context(), items); err != nil {
		t.Fatal(err)
	}
	var busy uint64
	status := make([]pool.Status, 100)
	if err := r.plain.Exists(t.Context(), keysOf(items), status); err != nil {
		t.Fatal(err)
	}
	for i := range items {
		if items[i].Status == pool.Busy {
			busy++
		}
		if (items[i].Status == pool.Busy) == (status[i] == pool.OK) {
			t.Fatalf("item %d: put says %d, and the store below says %d", i, items[i].Status, status[i])
		}
	}
	if busy < 20 || busy > 80 {
		t.Fatalf("%d of 100 items find the store full at a rate of 0.5", busy)
	}
	r.wantCount(Full, busy)
}

func TestFlip(t *testing.T) {
	r := newRig(t, only(Flip, 1))
	want := r.stored(3)
	got := r.items(3)
	if err := r.Get(t.Context(), got); err != nil {
		t.Fatal(err)
	}
	for i := range got {
		if n := differentBits(got[i].Data, want[i].Data); got[i].Status != pool.OK || n != 1 {
			t.Fatalf("item %d: status %d and %d bits turned, want OK and 1", i, got[i].Status, n)
		}
	}
	r.wantCount(Flip, 3)
}

func TestFlipPut(t *testing.T) {
	r := newRig(t, only(FlipPut, 1))
	mine, want := r.items(1), r.items(1)
	if err := r.Put(t.Context(), mine); err != nil || mine[0].Status != pool.OK {
		t.Fatalf("put: %v, status %d", err, mine[0].Status)
	}
	if !bytes.Equal(mine[0].Data, want[0].Data) {
		t.Fatal("the caller's bytes were changed")
	}
	got := r.items(1)
	if err := r.plain.Get(t.Context(), got); err != nil || differentBits(got[0].Data, want[0].Data) != 1 {
		t.Fatalf("get: %v, %d bits are wrong below, want 1", err, differentBits(got[0].Data, want[0].Data))
	}
	r.wantCount(FlipPut, 1)
}

func TestShort(t *testing.T) {
	r := newRig(t, only(Short, 1))
	want := r.stored(1)
	got := r.items(1)
	if err := r.Get(t.Context(), got); err != nil || got[0].Status != pool.Corrupt {
		t.Fatalf("get: %v, status %d, want Corrupt", err, got[0].Status)
	}
	if bytes.Equal(got[0].Data, want[0].Data) {
		t.Fatal("everything arrived")
	}
	r.wantCount(Short, 1)
}

func TestLostDelete(t *testing.T) {
	r := newRig(t, only(LostDelete, 1))
	keys := keysOf(r.stored(3))
	if err := r.Delete(t.Context(), keys); err != nil || r.Usage().Items != 3 {
		t.Fatalf("delete: %v, %d items are left, want 3", err, r.Usage().Items)
	}
	r.wantCount(LostDelete, 3)
	r.Switch(false, LostDelete)
	if err := r.Delete(t.Context(), keys); err != nil || r.Usage().Items != 0 {
		t.Fatalf("delete after it was switched off: %v, %d items are left", err, r.Usage().Items)
	}
	r.wantCount(LostDelete, 3)
}

func TestDelayIsByTheClockGiven(t *testing.T) {
	o := only(Delay, 1)
	o.MaxDelay = time.Hour
	var slept time.Duration
	o.Sleep = func(_ context.Context, d time.Duration) error { slept += d; return nil }
	r := newRig(t, o)
	for range 4 {
		if err := r.Put(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
	}
	if slept == 0 || slept > 4*time.Hour {
		t.Fatalf("4 calls slept %v, want up to 4 h", slept)
	}
	r.wantCount(Delay, 4)
}

func TestDelayEndsWithTheContext(t *testing.T) {
	o := only(Delay, 1)
	o.MaxDelay = time.Hour
	r := newRig(t, o)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := r.Get(ctx, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("get: %v", err)
	}
}

func TestHangEndsWithTheContext(t *testing.T) {
	r := newRig(t, only(Hang, 1))
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := r.Exists(ctx, nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("exists: %v", err)
	}
	r.wantCount(Hang, 1)
}

func TestHangEndsWhenItIsSwitchedOff(t *testing.T) {
	r := newRig(t, only(Hang, 1))
	done := make(chan error)
	go func() { done <- r.Put(t.Context(), r.items(1)) }()
	pooltest.Until(t, "put hangs", func() bool {
		select {
		case err := <-done:
			t.Fatalf("put came back: %v", err)
		default:
		}
		return r.Counts()[Hang] > 0
	})
	r.Switch(false)
	if err := <-done; err != nil || r.Usage().Items != 1 {
		t.Fatalf("put: %v, %d items are stored, want 1", err, r.Usage().Items)
	}
}

func TestSeedRepeats(t *testing.T) {
	run := func(seed uint64, off ...Kind) map[Kind]uint64 {
		o := Every(seed, 0.3)
		o.Rates[Hang], o.Sleep = 0, func(context.Context, time.Duration) error { return nil }
		r := newRig(t, o)
		r.Switch(false, append(off, Hang)...)
		for range 50 {
			_ = r.Put(t.Context(), r.items(5)) // failures are counted
			_ = r.Get(t.Context(), r.items(5))
			_ = r.Delete(t.Context(), keysOf(r.items(5)))
		}
		return r.Counts()
	}
	first := run(1)
	if !maps.Equal(first, run(1)) {
		t.Fatal("one seed, two courses")
	}
	if maps.Equal(first, run(2)) {
		t.Fatal("two seeds, one course")
	}
	if first[Error] != run(1, Delay)[Error] {
		t.Fatal("switching delays off changed the errors")
	}
}

func TestOptions(t *testing.T) {
	for name, o := range map[string]Options{
		"rate above 1":   only(Flip, 1.1),
		"rate below 0":   only(Flip, -0.1),
		"unknown kind":   only(kinds, 0.5),
		"delay too long": {MaxDelay: 2 * time.Hour},
		"delay below 0":  {MaxDelay: -1},
	} {
		if _, err := New(nil, o); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

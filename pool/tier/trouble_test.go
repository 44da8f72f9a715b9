package tier

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// filled returns a store with a chain, both its shards, and a node whose memory lacks it. The store
// has faults that are switched off.
func filled(
	t *testing.T, h pool.Hashes, rates map[fault.Kind]float64, tr Tier, o Options,
) (n *node, f *fault.Store, store *pooltest.Shelf) {
	t.Helper()
	store = pooltest.NewShelf()
	writer := newNode(t, 2*h.N+64, 2, Options{Node: "writer"}, Tier{Name: "shared", Store: store, Write: OnSave})
	writer.save(h)
	writer.stored(0, uint64(h.N))
	f, err := fault.New(store, fault.Options{Seed: 1, Rates: rates})
	check(t, err)
	f.Switch(false)
	tr.Name, tr.Store = "shared", f
	return newNode(t, 2*h.N+200, 2, o, tr), f, store
}

// TestHungStore checks that a store that hangs delays no look-up beyond its deadline, opens the
// breaker, and is used again when it is back.
func TestHungStore(t *testing.T) { synctest.Test(t, hungStore) }

func hungStore(t *testing.T) {
	const deadline = time.Millisecond
	h := chain("a", 20)
	n, f, _ := filled(t, h, map[fault.Kind]float64{fault.Hang: 1},
		Tier{AskWithin: 20 * time.Millisecond, BreakFirst: 20 * time.Millisecond}, Options{})
	f.Switch(true)
	pending := 0
	for i := range 200 {
		start := time.Now()
		if n.ask(h, deadline) {
			pending++
		}
		if took := time.Since(start); took > deadline {
			t.Errorf("look-up %d ended after %v, its deadline was %v", i, took, deadline)
		}
		if got := n.Prefix(n.space, 0, h); got != 0 {
			t.Fatalf("%d blocks of a store that hangs", got)
		}
	}
	if pending == 0 {
		t.Error("no look-up waited for the store")
	}
	n.waitFor("the breaker opens", func(r *pool.TierReport) bool { return r.Tiers[0].Opened > 0 })
	f.Switch(false)
	n.waitFor("the breaker closes", func(r *pool.TierReport) bool { return r.Tiers[0].State == "up" })
	if got := n.know(h); got != 20 {
		t.Errorf("%d blocks after the store is back, want 20", got)
	}
}

// TestHungFetch checks that a promise of a store that hangs is settled when the breaker opens or
// its time is over, and that nothing of it is left.
func TestHungFetch(t *testing.T) {
	h := chain("a", 20)
	n, f, _ := filled(t, h, map[fault.Kind]float64{fault.Hang: 1}, Tier{FetchWithin: 30 * time.Millisecond}, Options{})
	n.know(h)
	f.Switch(true)
	count, refs := n.settled(h)
	if count != 20 {
		t.Fatalf("%d promised", count)
	}
	if got := n.load(h); got != 0 {
		t.Errorf("%d blocks came out of a store that hangs", got)
	}
	n.Unpin(refs)
	f.Switch(false)
}

// TestDamage checks that damage when writing or reading, and a value under another key, are counted
// as misses, and that such values are deleted.
func TestDamage(t *testing.T) {
	h := chain("a", 20)
	n, f, store := filled(t, h, map[fault.Kind]float64{fault.Flip: 1}, Tier{}, Options{})
	n.know(h)
	f.Switch(true)
	_, refs := n.settled(h)
	if got := n.load(h); got != 0 {
		t.Fatalf("%d damaged blocks came to memory", got)
	}
	n.Unpin(refs)
	r := n.Report()
	if r.Tiers[0].Corrupt != 40 || r.Tiers[0].Misses != 20 {
		t.Errorf("%d damaged, %d misses; want 40 shards of 20 blocks", r.Tiers[0].Corrupt, r.Tiers[0].Misses)
	}
	n.waitFor("what was damaged is deleted", func(*pool.TierReport) bool { return store.Len() == 0 })
	if got := n.Prefix(n.space, 0, h); got != 0 {
		t.Errorf("%d damaged blocks are still known", got)
	}
}

// crossed is a store that returns one block's value for another's key, and the reverse.
type crossed struct {
	pool.Store
	a, b pool.Hash
}

func (c crossed) Get(ctx context.Context, items []pool.Item) error {
	other := map[pool.Hash]pool.Hash{c.a: c.b, c.b: c.a}
	wrong := slices.Clone(items)
	for i := range wrong {
		wrong[i].Key.Hash = other[items[i].Key.Hash]
	}
	err := c.Store.Get(ctx, wrong)
	for i := range wrong {
		items[i].Status = wrong[i].Status
	}
	return err
}

// TestCrossedKeys checks that a value that a store has under another key is not delivered.
func TestCrossedKeys(t *testing.T) {
	h := chain("a", 2)
	store := pooltest.NewShelf()
	writer := newNode(t, 64, 2, Options{}, Tier{Name: "shared", Store: store, Write: OnSave})
	writer.save(h)
	writer.stored(0, 2)
	n := newNode(t, 64, 2, Options{}, Tier{Name: "shared",
		Store: crossed{store, pool.MakeHash(h.At(0)), pool.MakeHash(h.At(1))}})
	n.know(h)
	_, refs := n.settled(h)
	if got := n.load(h); got != 0 {
		t.Errorf("%d blocks came from a store that mixes keys up", got)
	}
	n.Unpin(refs)
}

// TestLostShard checks that a block of which the store lost one shard is not delivered, and that
// its other shards are deleted so that it can be written again.
func TestLostShard(t *testing.T) {
	h := chain("a", 3)
	n, _, store := filled(t, h, nil, Tier{}, Options{})
	n.know(h)
	key := n.key(n.batch(h, 1), 1)
	check(t, store.Delete(t.Context(), []pool.Key{key}))
	_, refs := n.settled(h)
	if got := n.Prefix(n.space, 0, h); got != 1 {
		t.Errorf("prefix %d, want 1", got)
	}
	n.Unpin(refs)
	n.waitFor("the rest is deleted", func(*pool.TierReport) bool { return store.Len() == 4 })
}

// TestResetFence checks that nothing stored before a reset is found after it: in memory, in a tier,
// in the next process or from what was in flight.
func TestResetFence(t *testing.T) {
	h := chain("a", 20)
	state := filepath.Join(t.TempDir(), "resets")
	n, f, store := filled(t, h, map[fault.Kind]float64{fault.Hang: 1}, Tier{Write: OnSave}, Options{State: state})
	n.know(h)
	f.Switch(true)
	_, refs, _ := n.Pin(n.space, 0, h, 1<<40, nil)
	epoch, err := n.ResetSpace(n.space)
	if err != nil || epoch != 2 {
		t.Fatalf("epoch %d, %v", epoch, err)
	}
	f.Switch(false)
	n.settle(refs)
	if got := n.load(h); got != 0 {
		t.Errorf("%d blocks of the old epoch were brought to memory", got)
	}
	n.Unpin(refs)
	if got := n.know(h); got != 0 {
		t.Errorf("%d blocks of the old epoch are found in the tier", got)
	}
	n.save(h)
	n.stored(0, 20)
	n.flush()
	if got := n.know(h); got != 20 {
		t.Errorf("%d blocks of the new epoch are found, want 20", got)
	}
	n.waitFor("the marker is put", func(*pool.TierReport) bool { return store.Len() == 81 })
	for _, name := range []string{state, ""} {
		next := newNode(t, 200, 2, Options{State: name}, Tier{Name: "shared", Store: store})
		if name == "" { // another node, which has to hear of it first
			next.waitFor("the reset is adopted", func(r *pool.TierReport) bool { return r.Adopted == 1 })
		}
		if got := next.know(h); got != 20 || next.StoredAs(n.spec.Fingerprint) != n.StoredAs(n.spec.Fingerprint) {
			t.Errorf("state %q: the next process finds %d, want 20, under the new name", name, got)
		}
	}
	if store.Len() != 81 {
		t.Errorf("%d values are stored, want 40 of each epoch and a marker", store.Len())
	}
	check(t, os.WriteFile(state, []byte("{"), 0o600))
	if _, err := Open(n.mem, nil, Options{State: state}); err == nil {
		t.Error("a damaged file of resets was accepted")
	}
}

// TestResetNotKept checks that a reset that cannot be saved is an error, and turns the tiers off
// for the space.
func TestResetNotKept(t *testing.T) {
	h := chain("a", 5)
	dir := filepath.Join(t.TempDir(), "gone")
	n, _, _ := filled(t, h, nil, Tier{Write: OnSave}, Options{State: filepath.Join(dir, "resets")})
	if _, err := n.ResetSpace(n.space); err == nil {
		t.Error("a reset that is not kept is acknowledged")
	}
	n.save(h)
	n.flush()
	if got := n.know(h); got != 0 {
		t.Errorf("%d blocks are found in a tier whose reset was not kept", got)
	}
	check(t, n.CloseSpace(n.space))
	var err error
	n.space, err = n.OpenSpace(n.spec)
	check(t, err)
	if got := n.know(h); got != 0 {
		t.Errorf("%d blocks are found when the space is open again", got)
	}
}

// TestCancelAndHint checks that Unpin cancels a queued promise, and that a hint is fetched although
// it has no pins.
func TestCancelAndHint(t *testing.T) {
	h := chain("a", 40)
	n, f, _ := filled(t, h, map[fault.Kind]float64{fault.Hang: 1},
		Tier{Workers: 1, BatchItems: 2, FetchWithin: time.Minute, BreakAfter: 1000}, Options{})
	n.know(h)
	f.Switch(true)
	_, refs, _ := n.Pin(n.space, 0, h, 1<<40, nil)
	n.waitFor("one is under way", func(r *pool.TierReport) bool { return r.Tiers[0].Fetching == 39 })
	settled := make(chan struct{})
	n.whenSettled(refs[10:], func() { close(settled) })
	never := n.Settle(refs[:1], func() { t.Error("a Settle was cancelled, and called nevertheless") })
	if !never() || never() {
		t.Error("cancel must say once that then had not been called")
	}
	n.Unpin(refs[10:])
	<-settled
	if r := n.Report(); r.Promises != 10 || r.Cancelled != 30 {
		t.Errorf("%d promises are left, %d cancelled; want 10, 30", r.Promises, r.Cancelled)
	}
	n.Hint(refs[:10])
	f.Switch(false)
	n.waitFor("hinted blocks have come", func(r *pool.TierReport) bool { return r.Promises == 0 })
	if got := n.mem.Prefix(n.space, 0, h); got != 10 {
		t.Errorf("%d blocks came, want the 10 that were hinted", got)
	}
	if s := n.mem.Stats(); s.Pinned != 0 {
		t.Errorf("%d bytes are pinned by nobody", s.Pinned)
	}
}

// TestBudget checks that promises stay within the prefetch budget, and a Pin within its bytes.
func TestBudget(t *testing.T) {
	h := chain("a", 100)
	n, f, _ := filled(t, h, map[fault.Kind]float64{fault.Hang: 1}, Tier{FetchWithin: time.Minute, BreakAfter: 1000},
		Options{PrefetchBytes: 64 << 10})
	n.know(h)
	f.Switch(true)
	count, refs, bytes := n.Pin(n.space, 0, h, 1<<40, nil)
	if count != 32 || bytes != 64<<10 {
		t.Errorf("%d blocks of 2 KiB, %d bytes promised within 64 KiB", count, bytes)
	}
	again, others, _ := n.Pin(n.space, 0, h, 20<<10, nil) // the same promises
	if again != 10 {
		t.Errorf("%d blocks pinned within 20 KiB, want 10", again)
	}
	n.Unpin(refs)
	n.Unpin(others)
	f.Switch(false)
	n.waitFor("all is settled", func(r *pool.TierReport) bool { return r.Promises == 0 })
}

// TestFullStore checks that a full store gets no writes for a while, and nothing fails.
func TestFullStore(t *testing.T) {
	f, err := fault.New(pooltest.NewShelf(), fault.Options{Seed: 1, Rates: map[fault.Kind]float64{fault.Full: 1}})
	check(t, err)
	n := newNode(t, 400, 1, Options{}, Tier{Name: "shared", Store: f, Write: OnSave})
	n.save(chain("a", 10))
	n.waitFor("full", func(r *pool.TierReport) bool { return r.Tiers[0].State == "full" && r.Tiers[0].Full >= 10 })
	f.Switch(false)
	n.save(chain("b", 10))
	n.stored(0, 10)
}

// TestSecondUse checks that blocks that are only saved are not written, and that blocks that a
// look-up reserves again are.
func TestSecondUse(t *testing.T) {
	store := pooltest.NewShelf()
	n := newNode(t, 400, 1, Options{}, Tier{Name: "disk", Store: store, Local: true, Write: OnSecondUse})
	n.save(chain("once", 10))
	n.save(chain("twice", 10))
	_, refs, _ := n.Pin(n.space, 0, chain("twice", 10), 1<<40, nil)
	n.stored(0, 10)
	n.Unpin(refs)
	if store.Len() != 10 {
		t.Errorf("%d blocks are written, want 10", store.Len())
	}
}

// TestCloseSettles checks that Close settles every promise.
func TestCloseSettles(t *testing.T) {
	h := chain("a", 40)
	n, f, _ := filled(t, h, map[fault.Kind]float64{fault.Hang: 1}, Tier{FetchWithin: time.Minute}, Options{})
	n.know(h)
	f.Switch(true)
	_, refs, _ := n.Pin(n.space, 0, h, 1<<40, nil)
	done := make(chan struct{})
	n.whenSettled(refs, func() { close(done) })
	check(t, n.Pool.Close())
	<-done
	n.Unpin(refs)
	if err := n.Pool.Close(); !errors.Is(err, pool.ErrClosed) {
		t.Errorf("closed twice: %v", err)
	}
}

// TestOneOfTwoFails checks that a shared tier that fails does not hide what another one has.
func TestOneOfTwoFails(t *testing.T) {
	h := chain("a", 200) // more than one question
	n, _, store := filled(t, h, nil, Tier{}, Options{})
	broken, err := fault.New(pooltest.NewShelf(), fault.Options{Seed: 1, Rates: map[fault.Kind]float64{fault.Error: 1}})
	check(t, err)
	two := newNode(t, 2*h.N+200, 2, Options{}, Tier{Name: "broken", Store: broken, BreakAfter: 1000},
		Tier{Name: "shared", Store: store})
	if got := two.know(h); got != n.know(h) || got != 200 {
		t.Errorf("%d blocks are found beside a tier that fails, want 200", got)
	}
}

package hints_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/hints"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

const (
	blockBytes = 16 << 10
	poolBytes  = 1 << 20 // 64 blocks
)

// world is a pool of 64 blocks with one space, and a ledger on it whose clock a test moves.
type world struct {
	t      testing.TB
	pool   *dram.Pool
	space  pool.SpaceID
	ledger *hints.Ledger
	clock  sync.Mutex
	now    time.Time
}

func newWorld(t testing.TB, budget int64) *world {
	t.Helper()
	return newWorldOf(t, poolBytes, budget)
}

func newWorldOf(t testing.TB, bytes, budget int64) *world {
	t.Helper()
	p, err := dram.Open(dram.Options{Bytes: bytes, SlabBytes: 64 << 10, HugePages: dram.Off})
	check(t, err)
	w := &world{t: t, pool: p, now: time.Unix(1_000, 0)}
	w.space, err = p.OpenSpace(pool.Spec{
		Identity: []byte("x"), Shards: 1, Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{blockBytes}}},
	})
	check(t, err)
	now := func() time.Time {
		w.clock.Lock()
		defer w.clock.Unlock()
		return w.now
	}
	w.ledger = hints.New(hints.Config{Memory: p, Capacity: bytes, PinBudget: budget, Ranks: true, Now: now})
	t.Cleanup(func() {
		w.ledger.Close()
		if st := p.Stats(); st.Pinned != 0 || w.ledger.Report().PinnedBytes != 0 {
			t.Errorf("%d bytes are pinned after Close, the ledger has %+v", st.Pinned, w.ledger.Report())
		}
		check(t, p.Close())
	})
	return w
}

// chain returns the hashes of a prompt's blocks.
func chain(name string, n int) pool.Hashes {
	var blob []byte
	for i := range n {
		blob = fmt.Appendf(blob, "%-11s%05d", name, i)
	}
	return pool.Chain(blob, 16)
}

// save stores blocks, as an engine's save does.
func (w *world) save(h pool.Hashes) {
	b := pool.Batch{
		Space: w.space, Epoch: w.pool.Epoch(w.space), Hashes: h,
		Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
	}
	w.pool.Reserve(&b)
	var slots []pool.Slot
	for i, s := range b.Status {
		if s == pool.OK {
			slots = append(slots, b.Slots[i])
		}
	}
	w.pool.Commit(slots, b.Epoch, make([]pool.Status, len(slots)))
}

// flood stores so much that everything else is evicted that may be.
func (w *world) flood(name string) {
	for i := range 8 {
		w.save(chain(fmt.Sprint(name, i), 16))
	}
}

// stored returns how many of the blocks are stored.
func (w *world) stored(h pool.Hashes) (n int) {
	present := make([]bool, h.N)
	w.pool.Exists(w.space, 0, h, present)
	for _, there := range present {
		if there {
			n++
		}
	}
	return n
}

func (w *world) pass(d time.Duration) {
	w.clock.Lock()
	w.now = w.now.Add(d)
	w.clock.Unlock()
	w.ledger.Expire()
}

// do carries out actions on blocks, and returns their receipts.
func (w *world) do(h pool.Hashes, actions ...hints.Action) []hints.Receipt {
	return w.ledger.Told(&hints.Hint{
		Space: w.space, Actions: actions, Chains: []hints.Chain{{Hashes: h}}, Exact: true,
	})
}

func (w *world) pin(h pool.Hashes, lasts time.Duration) hints.Receipt {
	return w.do(h, hints.Action{Kind: hints.Pin, For: lasts})[0]
}

func (w *world) drop(h pool.Hashes, after time.Duration) hints.Receipt {
	return w.do(h, hints.Action{Kind: hints.Drop, For: after})[0]
}

func (w *world) want(what string, h pool.Hashes, n int) {
	w.t.Helper()
	if got := w.stored(h); got != n {
		w.t.Errorf("%s: %d blocks are stored, want %d", what, got, n)
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestPinnedBlocksAreNotEvicted(t *testing.T) {
	w := newWorld(t, poolBytes/4)
	a := chain("a", 8)
	w.save(a)
	w.pin(a, 10*time.Second)
	w.flood("first")
	w.want("pinned", a, 8)
	w.pass(9 * time.Second)
	w.flood("second")
	w.want("after 9 of 10 s", a, 8)
	w.pass(time.Second)
	if r := w.ledger.Report(); r.PinnedBlocks != 0 || r.PinnedBytes != 0 {
		t.Errorf("after its time: %+v", r)
	}
	w.want("just after its time", a, 8)
	w.flood("third")
	w.want("evicted after its time", a, 0)
}

func TestTheLongestPinCountsAndABlockCountsOnce(t *testing.T) {
	w := newWorld(t, 8*blockBytes)
	a := chain("a", 8)
	w.save(a)
	for _, pin := range []time.Duration{5 * time.Second, 20 * time.Second, time.Second} {
		w.pin(a, pin)
	}
	if r := w.ledger.Report(); r.PinnedBlocks != 8 || r.PinnedBytes != 8*blockBytes || r.Rejected != 0 {
		t.Errorf("%+v, want 8 blocks, pinned once", r)
	}
	w.pass(19 * time.Second)
	w.flood("first")
	w.want("before the end of the longest", a, 8)
	w.pass(time.Second)
	w.flood("second")
	w.want("after the end of the longest", a, 0)
}

func TestPinsStayWithinTheBudget(t *testing.T) {
	w := newWorld(t, 6*blockBytes+blockBytes/2)
	a, b := chain("a", 10), chain("b", 4)
	w.save(a)
	w.save(b)
	if r := w.pin(a, time.Hour); r.State != hints.Clipped || r.Blocks != 6 || r.Bytes != 6*blockBytes {
		t.Errorf("%+v, want 6 blocks", r)
	}
	if r := w.pin(b, time.Hour); r.State != hints.Rejected || r.Blocks != 0 || !strings.Contains(r.Reason, "bytes") {
		t.Errorf("%+v, want none", r)
	}
	if r := w.ledger.Report(); r.PinnedBlocks != 6 || r.PinnedBytes != 6*blockBytes {
		t.Errorf("%+v, want 6 blocks pinned", r)
	}
	w.flood("others")
	w.want("the first of the first request", a.Slice(0, 6), 6)
	w.want("beyond the budget", a.Slice(6, 10), 0)
	w.want("of the second request", b, 0)
	if st := w.pool.Stats(); st.Pinned != 6*blockBytes {
		t.Errorf("%d bytes are pinned in the pool", st.Pinned)
	}
	none := newWorld(t, 0)
	none.save(a)
	if r := none.pin(a, time.Hour); r.State != hints.Rejected {
		t.Errorf("without a budget: %+v", r)
	}
}

func TestBlocksThatAreNotStoredAreIgnored(t *testing.T) {
	w := newWorld(t, poolBytes/4)
	a := chain("a", 8)
	w.save(a.Slice(0, 2))
	w.save(a.Slice(5, 6))
	if r := w.pin(a, time.Minute); r.State != hints.Accepted || r.Blocks != 3 {
		t.Errorf("%+v, want the 3 that are stored", r)
	}
	for what, h := range map[string]*hints.Hint{
		"another space": {Space: 77, Chains: []hints.Chain{{Hashes: a}}, Exact: true},
		"another group": {Space: w.space, Chains: []hints.Chain{{Group: 3, Hashes: a}}, Exact: true},
	} {
		for kind := hints.Retain; kind <= hints.Drop; kind++ {
			h.Actions = append(h.Actions, hints.Action{Kind: kind})
		}
		for _, r := range w.ledger.Told(h) {
			if r.State != hints.Missing || r.Reason == "" {
				t.Errorf("%s: %+v, want missing", what, r)
			}
		}
	}
}

func TestAResetEndsPins(t *testing.T) {
	w := newWorld(t, poolBytes/4)
	a := chain("a", 8)
	w.save(a)
	w.pin(a, time.Hour)
	w.drop(a, time.Second)
	_, err := w.pool.ResetSpace(w.space)
	check(t, err)
	w.save(a) // the same hashes, computed by other weights
	w.pass(time.Second)
	if r, st := w.ledger.Report(), w.pool.Stats(); r.PinnedBlocks != 0 || st.Pinned != 0 {
		t.Errorf("after a reset: %+v, and %d bytes are pinned", r, st.Pinned)
	}
	w.want("stored after the reset", a, 8)
}

func TestUnusedBlocksAreDroppedAtTheirTime(t *testing.T) {
	w := newWorld(t, 0)
	a := chain("a", 8)
	w.save(a)
	w.drop(a, 10*time.Second)
	w.pass(9 * time.Second)
	w.want("before their time", a, 8)
	w.pass(time.Second)
	w.want("at their time", a, 0)
	if r := w.ledger.Report(); r.Dropped != 8 || r.Pending != 0 {
		t.Errorf("%+v, want 8 dropped", r)
	}
}

func TestUsedBlocksStay(t *testing.T) {
	for name, use := range map[string]func(w *world, h pool.Hashes){
		"looked up": func(w *world, h pool.Hashes) { w.pool.Prefix(w.space, 0, h) },
		"leased": func(w *world, h pool.Hashes) {
			_, refs, _ := w.pool.Pin(w.space, 0, h, poolBytes, nil)
			w.pool.Unpin(refs)
		},
		"saved again":         func(w *world, h pool.Hashes) { w.save(h) },
		"pinned by a request": func(w *world, h pool.Hashes) { w.pin(h, time.Second) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, poolBytes/4)
			a := chain("a", 8)
			w.save(a)
			w.drop(a, 10*time.Second)
			use(w, a.Slice(0, 3))
			w.pass(10 * time.Second)
			w.want("used", a.Slice(0, 3), 3)
			w.want("not used", a.Slice(3, 8), 0)
		})
	}
}

// Writing to a tier and being asked about are no uses.
func TestReadingForATierIsNoUse(t *testing.T) {
	w := newWorld(t, 0)
	a := chain("a", 4)
	w.save(a)
	w.drop(a, time.Second)
	b := pool.Batch{Space: w.space, Hashes: a, Status: make([]pool.Status, a.N), Slots: make([]pool.Slot, a.N)}
	w.pool.Acquire(&b)
	w.pool.Release(b.Slots, b.Status)
	w.want("asked about", a, 4)
	w.pass(time.Second)
	w.want("at their time", a, 0)
}

// A block whose time is over while a tier reads it is dropped too, and freed afterwards.
func TestDroppedWhileATierReads(t *testing.T) {
	w := newWorld(t, 0)
	a := chain("a", 1)
	w.save(a)
	w.drop(a, time.Second)
	b := pool.Batch{Space: w.space, Hashes: a, Status: make([]pool.Status, 1), Slots: make([]pool.Slot, 1)}
	w.pool.Acquire(&b)
	w.pass(time.Second)
	w.pool.Release(b.Slots, b.Status)
	w.want("at its time", a, 0)
	if st := w.pool.Stats(); st.Used != 0 || st.Pinned != 0 {
		t.Errorf("%d bytes are used and %d pinned, want none", st.Used, st.Pinned)
	}
}

// Blocks that a tier reads when they are told to be dropped, as it does right after a save, are
// dropped like others.
func TestDropToldWhileATierReads(t *testing.T) {
	for _, after := range []time.Duration{0, time.Second} {
		w := newWorld(t, 0)
		a := chain("a", 4)
		w.save(a)
		b := pool.Batch{
			Space: w.space, Hashes: a.Slice(3, 4), Status: make([]pool.Status, 1), Slots: make([]pool.Slot, 1),
		}
		w.pool.Acquire(&b)
		w.drop(a, after)
		w.pool.Release(b.Slots, b.Status)
		w.pass(after)
		w.want("at their time", a, 0)
		if st := w.pool.Stats(); st.Used != 0 || st.Pinned != 0 {
			t.Errorf("%d bytes are used and %d pinned, want none", st.Used, st.Pinned)
		}
	}
}

func TestBlocksInUseAreNotDropped(t *testing.T) {
	w := newWorld(t, 0)
	a := chain("a", 4)
	w.save(a)
	_, refs, _ := w.pool.Pin(w.space, 0, a, poolBytes, nil) // by a load that runs
	w.drop(a, time.Second)
	w.pass(time.Second)
	w.want("while a load reads them", a, 4)
	w.pool.Unpin(refs)
}

// Blocks in use when they are told to be dropped, and not at their time, are dropped.
func TestDropToldWhileInUse(t *testing.T) {
	w := newWorld(t, 0)
	a := chain("a", 4)
	w.save(a)
	_, refs, _ := w.pool.Pin(w.space, 0, a, poolBytes, nil)
	w.drop(a, time.Second)
	w.pool.Unpin(refs)
	w.pass(time.Second)
	w.want("at their time", a, 0)
}

// Blocks that other blocks follow are dropped with the last of these, and not before: else nobody
// would find those.
func TestChainsAreDroppedFromTheirEnd(t *testing.T) {
	w := newWorld(t, 0)
	a := chain("a", 20)
	w.save(a)
	w.drop(a.Slice(0, 10), time.Second) // what follows is another request's
	w.pass(time.Second)
	w.want("followed by others", a, 20)
	w.drop(a.Slice(10, 20), time.Second)
	w.pass(time.Second)
	w.want("followed by others that were dropped", a, 0)

	w.save(a)
	w.drop(a.Slice(0, 10), time.Second)
	w.pass(time.Second)
	w.drop(a, time.Second) // anew: all wait for this one's time
	w.drop(a.Slice(10, 20), time.Nanosecond)
	w.pass(0)
	w.pass(time.Millisecond)
	w.want("marked anew", a.Slice(0, 10), 10)
	w.want("followed by none", a.Slice(10, 20), 0)
	w.pass(time.Second)
	w.want("at their time", a, 0)

	w.save(a)
	w.drop(a.Slice(0, 10), time.Second)
	w.pass(time.Second)
	w.pool.Prefix(w.space, 0, a.Slice(0, 10))
	w.drop(a.Slice(10, 20), time.Second)
	w.pass(time.Second)
	w.want("used after their time", a.Slice(0, 10), 10)
}

// Blocks are dropped in whichever order a hint names them, and however many there are.
func TestDroppedInAnyOrder(t *testing.T) {
	const blocks = 700
	w := newWorldOf(t, 16<<20, 0)
	a := chain("a", blocks)
	for name, order := range map[string]func(n int) []int{
		"in a random order": func(n int) []int { return rand.New(rand.NewPCG(1, 1)).Perm(n) },
		"from the last to the first": func(n int) (all []int) {
			for i := range n {
				all = append(all, n-1-i)
			}
			return all
		},
		"in two parts, the first one first": nil,
	} {
		w.save(a)
		if order == nil {
			w.drop(a.Slice(0, blocks/2), time.Second)
			w.drop(a.Slice(blocks/2, blocks), 2*time.Second)
			w.pass(time.Second)
			w.want("the first part, followed by the second", a, blocks)
		} else {
			var blob []byte
			for _, i := range order(blocks) {
				blob = append(blob, a.At(i)...)
			}
			w.drop(pool.Chain(blob, a.Len), time.Second)
		}
		w.pass(time.Second)
		w.want(name, a, 0)
	}
	if r := w.ledger.Report(); r.Dropped != 3*blocks || r.Pending != 0 {
		t.Errorf("%+v, want %d dropped", r, 3*blocks)
	}
}

// Requests, the clock, loads, saves and resets at once: nothing is pinned in the end, and never
// more than the budget.
func TestStorm(t *testing.T) {
	const budget = 10 * blockBytes
	w := newWorld(t, budget)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var all sync.WaitGroup
	for worker := range 6 {
		all.Go(func() {
			dice := rand.New(rand.NewPCG(seed, uint64(worker)))
			for range 400 {
				h := chain(fmt.Sprint("p", dice.IntN(12)), 1+dice.IntN(12))
				switch dice.IntN(8) {
				case 0, 1:
					w.save(h)
				case 2, 3:
					w.do(h, hints.Action{
						Kind: hints.Kind(1 + dice.IntN(5)), Priority: uint8(dice.IntN(101)),
						For: time.Duration(dice.IntN(9)) * time.Second,
					})
				case 4:
					w.pass(time.Second)
				case 5:
					_, refs, _ := w.pool.Pin(w.space, 0, h, poolBytes, nil)
					w.pool.Unpin(refs)
				case 6:
					if dice.IntN(20) == 0 {
						_, err := w.pool.ResetSpace(w.space)
						check(w.t, err)
						w.pool.Sweep()
					}
				default:
					r := w.ledger.Report()
					if r.PinnedBytes > budget || r.PinnedBytes != int64(r.PinnedBlocks)*blockBytes {
						t.Errorf("%+v", r)
					}
				}
			}
		})
	}
	all.Wait()
}

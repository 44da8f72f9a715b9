package tier

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

// shelved returns a store with chains, both shards of each block, of the space that nodes open.
func shelved(t *testing.T, all ...pool.Hashes) *pooltest.Shelf {
	t.Helper()
	store := pooltest.NewShelf()
	blocks := 0
	for _, h := range all {
		blocks += h.N
	}
	writer := newNode(t, 2*blocks+64, 2, Options{Node: "writer"}, Tier{Name: "shared", Store: store, Write: OnSave})
	for _, h := range all {
		writer.save(h)
	}
	writer.stored(0, uint64(blocks))
	return store
}

// moody is a store that fails while it is told to.
type moody struct {
	pool.Store
	fails atomic.Bool
}

var errMoody = errors.New("not now")

func (m *moody) Get(ctx context.Context, items []pool.Item) error {
	if m.fails.Load() {
		return errMoody
	}
	return m.Store.Get(ctx, items)
}

func (m *moody) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	if m.fails.Load() {
		return errMoody
	}
	return m.Store.Exists(ctx, keys, status)
}

// act is what happens to a tier at a step.
type act func(n *node, m *moody)

// breaks opens the breaker, and waits until all others wait: the monitor has emptied the queues by
// then.
func breaks(n *node, m *moody) {
	m.fails.Store(true)
	l := n.levels[0]
	for !l.breaker.failed(&l.Tier, moves, errMoody) && l.up() {
		continue
	}
	l.signal()
	time.Sleep(time.Nanosecond)
}

// breaksUnheard opens the breaker without running the monitor.
func breaksUnheard(n *node, m *moody) {
	m.fails.Store(true)
	l := n.levels[0]
	for !l.breaker.failed(&l.Tier, moves, errMoody) && l.up() {
		continue
	}
	l.signal()
}

// mends lets the monitor find the store at work again.
func mends(n *node, m *moody) {
	m.fails.Store(false)
	time.Sleep(2 * n.levels[0].BreakLast)
}

// closes closes the pool.
func closes(n *node, _ *moody) {
	go func() { _ = n.Pool.Close() }()
	time.Sleep(time.Nanosecond)
}

// moment is the time of an event in ns of the clock; -1 if it has not happened.
type moment struct{ atomic.Int64 }

func (m *moment) since(start time.Time) time.Duration {
	if m.Load() < 0 {
		return -1
	}
	return time.Duration(m.Load() - start.UnixNano())
}

// settledAfter returns when promises are settled.
func (n *node) settledAfter(refs []pool.Ref) *moment {
	m := &moment{}
	m.Store(-1)
	n.whenSettled(refs, func() { m.Store(time.Now().UnixNano()) })
	return m
}

// testPromise is PromiseWithin of promisesEnd.
const testPromise = 10 * time.Second

// promisesEnd pins a chain and hints another one, more than staging holds, and performs acts at
// steps. Everything must be settled within the given time.
func promisesEnd(
	t *testing.T, store pool.Store, pinned, hinted pool.Hashes, within time.Duration, acts map[int]act,
) (steps int) {
	synctest.Test(t, func(t *testing.T) {
		m := &moody{Store: store}
		var n *node
		armed, count := atomic.Bool{}, atomic.Int64{}
		o := Options{Log: func(string, string, error) {}, PromiseWithin: testPromise}
		o.testHook = func() {
			if armed.Load() {
				if do := acts[int(count.Add(1))]; do != nil {
					do(n, m)
				}
			}
		}
		var err error
		o.Staging, err = transit.OpenStaging(64 << 10)
		check(t, err)
		n = newNode(t, 200, 2, o, Tier{
			Name: "shared", Store: m, Workers: 2, BatchItems: 20, BreakAfter: 2,
			BreakFirst: 100 * time.Millisecond, BreakLast: 100 * time.Millisecond,
			FoundFor: time.Hour,
		})
		n.know(pinned)
		n.know(hinted)
		armed.Store(true)
		start := time.Now()
		_, refs, _ := n.Pin(n.space, 0, pinned, 1<<40, nil)
		_, hints, _ := n.Pin(n.space, 0, hinted, 1<<40, nil)
		n.Hint(hints)
		settled := n.settledAfter(refs)
		time.Sleep(n.o.PromiseWithin + 2*time.Second)
		switch r := n.Report(); {
		case settled.Load() < 0:
			t.Errorf("a promise is never settled: %+v", r)
		case settled.since(start) > within:
			t.Errorf("a promise was settled after %v, allowed: %v", settled.since(start), within)
		case r.Promises != 0 || r.PromiseBytes != 0:
			t.Errorf("%d promises of %d bytes outlive their deadline", r.Promises, r.PromiseBytes)
		}
		armed.Store(false)
		n.load(pinned)
		n.Unpin(refs)
		steps = int(count.Load())
	})
	return steps
}

// TestNoPromiseOutlivesItsDeadline opens the breaker at every point that a promise passes, before
// and after its monitor has run, closes it again at every later one, and closes the pool at every
// point. Promises end at once if the breaker stays open, and on Close.
func TestNoPromiseOutlivesItsDeadline(t *testing.T) {
	pinned, hinted := chain("a", 20), chain("b", 4)
	store := shelved(t, pinned, hinted)
	steps := promisesEnd(t, store, pinned, hinted, 0, nil)
	if steps < 30 {
		t.Fatalf("%d steps, want one for each block at least", steps)
	}
	for name, first := range map[string]act{"breaks": breaks, "breaks unheard": breaksUnheard, "closes": closes} {
		for at := 1; at <= steps; at++ {
			t.Run(fmt.Sprint(name, " at ", at), func(t *testing.T) {
				promisesEnd(t, store, pinned, hinted, time.Second, map[int]act{at: first})
			})
			for back := at + 1; name != "closes" && back <= at+6; back++ {
				t.Run(fmt.Sprint(name, " at ", at, " mends at ", back), func(t *testing.T) {
					promisesEnd(t, store, pinned, hinted, testPromise+time.Second, map[int]act{at: first, back: mends})
				})
			}
		}
	}
}

// deaf is a store whose Get ignores its context.
type deaf struct {
	pool.Store
	wake chan struct{}
}

func (d deaf) Get(ctx context.Context, items []pool.Item) error {
	<-d.wake
	return d.Store.Get(context.WithoutCancel(ctx), items)
}

// TestPromisesOfADeafStoreEnd checks that a store that ignores its context keeps no promise open,
// and that Close settles them without it. A block that it delivers later is not
// installed.
func TestPromisesOfADeafStoreEnd(t *testing.T) {
	h := chain("a", 8)
	store := shelved(t, h)
	for name, closing := range map[string]bool{"deadline": false, "close": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := deaf{store, make(chan struct{})}
				n := newNode(t, 100, 2, Options{}, Tier{Name: "shared", Store: d, FetchWithin: time.Second})
				n.know(h)
				_, refs, _ := n.Pin(n.space, 0, h, 1<<40, nil)
				start, settled := time.Now(), n.settledAfter(refs)
				time.Sleep(time.Nanosecond) // the store has them now
				want := n.o.PromiseWithin
				if closing {
					want = 1
					go func() { _ = n.Pool.Close() }()
				}
				time.Sleep(2 * n.o.PromiseWithin)
				r, took := n.Report(), settled.since(start)
				if took != want || r.Promises != 0 || r.PromiseBytes != 0 || !closing && r.Expired != 8 {
					t.Errorf("settled after %v, want %v: %+v", took, want, r)
				}
				close(d.wake)
				time.Sleep(time.Nanosecond)
				if got := n.load(h); got != 0 {
					t.Errorf("%d blocks of promises that had ended are in memory", got)
				}
				n.Unpin(refs)
			})
		})
	}
}

// TestPromisesWithoutStagingEnd checks that a promise that never gets staging ends at its deadline,
// also while a worker waits for staging with it.
func TestPromisesWithoutStagingEnd(t *testing.T) {
	h := chain("a", 8)
	store := shelved(t, h)
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, 100, 2, Options{}, Tier{Name: "shared", Store: store})
		n.know(h)
		all := n.o.Staging.Take(16<<20, false)
		_, refs, _ := n.Pin(n.space, 0, h, 1<<40, nil)
		start, settled := time.Now(), n.settledAfter(refs)
		time.Sleep(2 * n.o.PromiseWithin)
		if r, took := n.Report(), settled.since(start); took != n.o.PromiseWithin || r.Promises != 0 ||
			r.PromiseBytes != 0 {
			t.Errorf("settled after %v, want %v: %+v", took, n.o.PromiseWithin, r)
		}
		n.o.Staging.Return(all)
		time.Sleep(time.Nanosecond)
		if got := n.load(h); got != 0 {
			t.Errorf("%d blocks of promises that had ended are in memory", got)
		}
		n.Unpin(refs)
	})
}

// waiting is a store whose Get waits until it is let go.
type waiting struct {
	pool.Store
	began chan struct{} // has an element for each Get
	let   chan struct{} // closed: they go on
}

func (w *waiting) Get(ctx context.Context, items []pool.Item) error {
	w.began <- struct{}{}
	<-w.let
	return w.Store.Get(ctx, items)
}

// TestWhatComesDuringAPinIsNotFetchedAgain lets a block come to memory between the look into memory
// and the promise of a second pin.
func TestWhatComesDuringAPinIsNotFetchedAgain(t *testing.T) {
	h := chain("a", 1)
	store := &waiting{shelved(t, h), make(chan struct{}, 10), make(chan struct{})}
	var hook func()
	n := newNode(t, 64, 2, Options{testHook: func() {
		if do := hook; do != nil {
			hook = nil
			do()
		}
	}}, Tier{Name: "shared", Store: store, FetchWithin: time.Hour})
	n.know(h)
	_, first, _ := n.Pin(n.space, 0, h, 1<<40, nil)
	<-store.began
	hook = func() { // the worker waits, so it is the second pin that calls
		close(store.let)
		n.settle(first)
	}
	count, second, _ := n.Pin(n.space, 0, h, 1<<40, nil)
	if count != 1 || len(second) != 1 || isPromise(second[0]) {
		t.Errorf("%d blocks are pinned as %v, want one in memory", count, second)
	}
	n.Unpin(first)
	n.Unpin(second)
}

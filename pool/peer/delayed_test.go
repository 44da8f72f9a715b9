package peer

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// allDelays is the time for which a block is tried again.
const allDelays = firstDelay*(1<<delays) - firstDelay

// fill stores and pins so much in a pool that about free bytes are left. It returns what unpins
// it.
func (a *agent) fill(free int64) (unpin func()) {
	a.t.Helper()
	st := a.Stats()
	h := chain("mine", int((st.Capacity-st.Used-free)/(96<<10)))
	a.save(h)
	var all []pool.Ref
	for group := range a.spec.Groups {
		n, refs, _ := a.Pin(a.space, uint8(group), h, 1<<40, nil)
		if n != h.N {
			a.t.Fatalf("%d of %d blocks are pinned", n, h.N)
		}
		all = append(all, refs...)
	}
	return func() { a.Unpin(all) }
}

// slowly has a server that takes a time to answer, so that a fetch reserves all that it can before.
func slowly(c *Config, _ *ClientConfig) {
	c.Slots = &beforeAcquire{c.Slots, func(*pool.Batch) { time.Sleep(time.Millisecond) }}
}

// TestSlotsComeFree: blocks that found no slot are fetched when there are some within the bound,
// and are busy after it. The prompt's beginning does not give way to its end.
func TestSlotsComeFree(t *testing.T) {
	for name, after := range map[string]time.Duration{"in time": allDelays / 2, "too late": allDelays + time.Second} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, slowly, func(t *testing.T, w *frozen) {
				unpin := w.d.fill(1 << 20)
				h := chain("a", 60)
				w.p.save(h)
				r := w.d.request("", h)
				r.Groups = r.Groups[:1]
				start := time.Now()
				var freed sync.WaitGroup
				freed.Go(func() {
					time.Sleep(after)
					unpin()
				})
				got, err := fetchAll(t, w.client, "p", r)
				took := time.Since(start)
				if n := w.d.Prefix(w.d.space, 0, h); n != got.Blocks {
					t.Errorf("%d blocks were stored, and the prompt's first %d are there: it gave way to itself",
						got.Blocks, n)
				}
				freed.Wait()
				if after < allDelays {
					if err != nil || got.Blocks != 60 || took > 2*allDelays {
						t.Errorf("%+v, %v after %v", got, err, took)
					}
					return
				}
				// The first pause ends early if blocks of the fetch itself are settled in it.
				least, most := allDelays-firstDelay, allDelays+firstDelay
				if err != nil || got.Failed[Busy] == 0 || got.Blocks+got.Failed[Busy] != 60 ||
					took < least || took > most {
					t.Errorf("%+v, %v after %v, want the rest to be busy after %v to %v", got, err, took, least, most)
				}
			})
		})
	}
}

// TestBlocksOfASave: blocks that a local engine is saving are fetched when its save fails within
// the bound; one that takes longer has them.
func TestBlocksOfASave(t *testing.T) {
	for name, after := range map[string]time.Duration{
		"it fails": allDelays / 2, "it is stored": allDelays / 2, "it takes long": allDelays + time.Second,
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, nil, func(t *testing.T, w *frozen) {
				h := chain("a", 10)
				w.p.save(h)
				b := w.d.batch(0, h.Slice(0, 4), 0)
				w.d.Reserve(b)
				start := time.Now()
				var saved sync.WaitGroup
				saved.Go(func() {
					time.Sleep(after)
					for i := range b.Status {
						key, s := w.d.key(b, i), &b.Slots[i]
						content(&key, w.d.arena[s.Off:s.Off+int64(s.Len)])
						s.Sum = pool.Sum(key.Seed(s.Len), w.d.arena[s.Off:s.Off+int64(s.Len)])
						if name == "it fails" {
							b.Status[i] = pool.Busy
						}
					}
					w.d.Commit(b.Slots, b.Epoch, b.Status)
				})
				got, err := fetchAll(t, w.client, "p", w.d.request("", h))
				took := time.Since(start)
				want, most := 0, allDelays
				if name == "it fails" {
					want, most = 4, 2*after
				}
				if err != nil || got.Blocks != 16+want || got.Failed[Had] != 4-want || took > most {
					t.Errorf("%+v, %v after %v", got, err, took)
				}
				saved.Wait()
				if n := w.d.has(h); n != 20 {
					t.Errorf("%d blocks are there", n)
				}
			})
		})
	}
}

// TestDelayedAndCancelled: a fetch that waits to try again ends with its caller, and says why its
// blocks are missing; one that waits for a lost peer's blocks keeps nothing.
func TestDelayedAndCancelled(t *testing.T) {
	inBubble(t, slowly, func(t *testing.T, w *frozen) {
		defer w.d.fill(1 << 20)()
		h := chain("a", 60)
		w.p.save(h)
		r := w.d.request("", h)
		r.Groups = r.Groups[:1]
		ctx, cancel := context.WithTimeout(t.Context(), allDelays/2)
		defer cancel()
		got, err := fetchWith(ctx, t, w.client, "p", r, nil)
		if !errors.Is(err, context.DeadlineExceeded) || got.Failed[Busy] == 0 || got.Failed[NotStored] != 0 {
			t.Errorf("%+v, %v", got, err)
		}
	})
}

// countedSlots counts batches that were to be reserved.
type countedSlots struct {
	pool.Slots
	n atomic.Int32
}

func (s *countedSlots) Reserve(b *pool.Batch) {
	s.n.Add(1)
	s.Slots.Reserve(b)
}

// TestRequeuePause: a fetch that waits for another one's blocks does not try to reserve all of them
// whenever some are settled.
func TestRequeuePause(t *testing.T) {
	// The GETs of one fetch, less than a connection queues: one for each block of the first group,
	// half as many for the second.
	const gets = 60
	slots := &countedSlots{}
	hooked := func(c *Config, cc *ClientConfig) {
		c.Slots = &beforeAcquire{c.Slots, func(*pool.Batch) { time.Sleep(firstDelay / gets) }}
		slots.Slots, cc.Slots = cc.Slots, slots
		cc.Streams, cc.BatchBytes = 1, 64<<10
	}
	inBubble(t, hooked, func(t *testing.T, w *frozen) {
		h := chain("a", 40)
		w.p.save(h)
		var all sync.WaitGroup
		results := make([]Result, 2)
		for i := range results {
			all.Go(func() {
				var err error
				if results[i], err = fetchAll(t, w.client, "p", w.d.request("", h)); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		all.Wait()
		if results[0].Blocks != 80 || results[1].Failed[Had] != 80 {
			t.Errorf("%+v", results)
		}
		// The first fetch reserves by GET, the second its blocks one by one: at first, once or
		// twice after the pause, and at the end.
		if n := slots.n.Load(); n > gets+4*80 {
			t.Errorf("%d batches were to be reserved", n)
		}
	})
}

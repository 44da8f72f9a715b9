package tier

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// deletesHang is a store whose values can be damaged, and whose deletes do not return until it
// works.
type deletesHang struct {
	pool.Store
	damaged atomic.Bool
	deletes atomic.Int64 // that hang
	works   chan struct{}
}

func (s *deletesHang) Get(ctx context.Context, items []pool.Item) error {
	err := s.Store.Get(ctx, items)
	if s.damaged.Load() {
		for i := range items {
			items[i].Data[len(items[i].Data)-1] ^= 1
		}
	}
	return err
}

func (s *deletesHang) Delete(ctx context.Context, keys []pool.Key) error {
	s.deletes.Add(1)
	defer s.deletes.Add(-1)
	select {
	case <-s.works:
		return s.Store.Delete(ctx, keys)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// TestDeletesHoldNoFetches fetches beside deletes that do not return, and expects all values that
// were found damaged meanwhile to be deleted once they do.
func TestDeletesHoldNoFetches(t *testing.T) {
	shelf := pooltest.NewShelf()
	w := newNode(t, 200, 1, Options{}, sharing(shelf))
	bad := []string{"a", "b", "c", "d"}
	for _, name := range append(bad, "good") {
		w.save(chain(name, 4))
	}
	w.stored(0, 20)
	store := &deletesHang{Store: shelf, works: make(chan struct{})}
	r := newNode(t, 200, 1, Options{}, sharing(store))
	for _, name := range append(bad, "good") {
		r.know(chain(name, 4))
	}
	store.damaged.Store(true)
	for _, name := range bad {
		_, refs := r.settled(chain(name, 4))
		r.Unpin(refs)
	}
	store.damaged.Store(false)
	n, refs := r.settled(chain("good", 4))
	r.Unpin(refs)
	if n != 4 || store.deletes.Load() == 0 {
		t.Errorf("%d of 4 blocks, %d deletes hang", n, store.deletes.Load())
	}
	close(store.works)
	r.waitFor("what was damaged is deleted", func(r *pool.TierReport) bool {
		return r.Tiers[0].Deleted == 16 && shelf.Len() == 4
	})
}

// still is a store that says what it has, and from which nothing arrives.
type still struct{ pool.Store }

func (still) Get(ctx context.Context, _ []pool.Item) error {
	<-ctx.Done()
	return ctx.Err()
}

// TestStoreThatOnlyAnswersQuestions checks that a store from which nothing arrives is not used,
// though it answers every question, and that each value that does not arrive then makes the pause
// longer.
func TestStoreThatOnlyAnswersQuestions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := pooltest.NewShelf()
		w := newNode(t, 200, 1, Options{}, sharing(store))
		n := newNode(t, 200, 1, Options{}, sharing(still{store}))
		l, tries := n.levels[0], 0
		try := func() {
			tries++
			h := chain(strconv.Itoa(tries), 1)
			w.save(h)
			w.stored(0, uint64(tries))
			if n.know(h) != 1 {
				t.Fatalf("prompt %d is not found", tries)
			}
			_, refs := n.settled(h)
			n.Unpin(refs)
		}
		for range l.BreakAfter {
			try()
		}
		for pause := l.BreakFirst; pause < 4*l.BreakFirst; pause *= 2 {
			if l.up() {
				t.Fatalf("it is used after %d values that did not arrive", tries)
			}
			time.Sleep(pause - time.Millisecond)
			if l.up() {
				t.Errorf("it is used again before a pause of %v", pause)
			}
			time.Sleep(2 * time.Millisecond)
			try()
		}
	})
}

package tier

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// deletesHang is a store whose values can be damaged, and whose deletes do not return.
type deletesHang struct {
	pool.Store
	damaged atomic.Bool
	deletes atomic.Int64 // that hang
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

func (s *deletesHang) Delete(ctx context.Context, _ []pool.Key) error {
	s.deletes.Add(1)
	defer s.deletes.Add(-1)
	<-ctx.Done()
	return ctx.Err()
}

// TestDeletesHoldNoFetches fetches beside deletes that do not return.
func TestDeletesHoldNoFetches(t *testing.T) {
	shelf := pooltest.NewShelf()
	w := newNode(t, 200, 1, Options{}, sharing(shelf))
	bad := []string{"a", "b", "c", "d"}
	for _, name := range append(bad, "good") {
		w.save(chain(name, 4))
	}
	w.stored(0, 20)
	store := &deletesHang{Store: shelf}
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
}

package pooltest

import (
	"bytes"
	"context"
	"maps"
	"sync"

	"github.com/kvagent/kvagent/pool"
)

// Shelf is the simplest store: a map. It takes any key and values of any length, as the stores
// below tiers must.
type Shelf struct {
	mu    sync.Mutex
	items map[pool.Key][]byte
}

// NewShelf makes an empty Shelf.
func NewShelf() *Shelf { return &Shelf{items: make(map[pool.Key][]byte)} }

// Put implements pool.Store.
func (s *Shelf) Put(ctx context.Context, items []pool.Item) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range items {
		if err := ctx.Err(); err != nil {
			return err
		}
		it := &items[i]
		switch n := it.Key.Hash.Len; {
		case n < 1 || n > pool.MaxHashLen:
			it.Status = pool.Invalid
		case s.items[it.Key] != nil:
			it.Status = pool.Exists
		default:
			it.Status = pool.OK
			s.items[it.Key] = bytes.Clone(it.Data)
		}
	}
	return nil
}

// Get implements pool.Store.
func (s *Shelf) Get(ctx context.Context, items []pool.Item) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range items {
		if err := ctx.Err(); err != nil {
			return err
		}
		it := &items[i]
		value := s.items[it.Key]
		switch {
		case value == nil:
			it.Status = pool.Missing
		case len(value) != len(it.Data):
			it.Status = pool.Invalid
		default:
			it.Status = pool.OK
			copy(it.Data, value)
		}
	}
	return nil
}

// Exists implements pool.Store.
func (s *Shelf) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range keys {
		if err := ctx.Err(); err != nil {
			return err
		}
		if status[i] = pool.Missing; s.items[keys[i]] != nil {
			status[i] = pool.OK
		}
	}
	return nil
}

// Delete implements pool.Store.
func (s *Shelf) Delete(ctx context.Context, keys []pool.Key) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range keys {
		delete(s.items, keys[i])
	}
	return ctx.Err()
}

// List calls found for each item that is stored when it is called, until found returns false.
func (s *Shelf) List(ctx context.Context, found func(k pool.Key, bytes int64) bool) error {
	s.mu.Lock()
	items := maps.Clone(s.items)
	s.mu.Unlock()
	for k, value := range items {
		if !found(k, int64(len(value))) {
			break
		}
	}
	return ctx.Err()
}

// Usage implements pool.Store.
func (s *Shelf) Usage() (u pool.Usage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, v := range s.items {
		u.Bytes += int64(len(v))
	}
	u.Items = int64(len(s.items))
	return u
}

// Len returns the number of items.
func (s *Shelf) Len() int { return int(s.Usage().Items) }

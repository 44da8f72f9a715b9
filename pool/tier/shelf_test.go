package tier

import (
	"bytes"
	"context"
	"sync"

	"github.com/kvagent/kvagent/pool"
)

// shelf is the plainest store: a map. It takes values of any length, as tiers must.
type shelf struct {
	mu    sync.Mutex
	items map[pool.Key][]byte
	puts  int // items stored, ever
	asked int // keys asked for
}

func newShelf() *shelf { return &shelf{items: make(map[pool.Key][]byte)} }

func (s *shelf) Put(ctx context.Context, items []pool.Item) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range items {
		if err := ctx.Err(); err != nil {
			return err
		}
		it := &items[i]
		if it.Status = pool.OK; s.items[it.Key] != nil {
			it.Status = pool.Exists
			continue
		}
		s.items[it.Key] = bytes.Clone(it.Data)
		s.puts++
	}
	return nil
}

func (s *shelf) Get(ctx context.Context, items []pool.Item) error {
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

func (s *shelf) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range keys {
		if err := ctx.Err(); err != nil {
			return err
		}
		s.asked++
		if status[i] = pool.Missing; s.items[keys[i]] != nil {
			status[i] = pool.OK
		}
	}
	return nil
}

func (s *shelf) Delete(ctx context.Context, keys []pool.Key) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range keys {
		delete(s.items, keys[i])
	}
	return ctx.Err()
}

func (s *shelf) Usage() (u pool.Usage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, v := range s.items {
		u.Bytes += int64(len(v))
	}
	u.Items = int64(len(s.items))
	return u
}

func (s *shelf) len() int { return int(s.Usage().Items) }

package fault

import (
	"bytes"
	"context"

	"github.com/kvagent/kvagent/pool"
)

// Put stores the items that are not refused as Full.
func (s *Store) Put(ctx context.Context, items []pool.Item) error {
	if err := s.begin(ctx); err != nil {
		return err
	}
	var sent []pool.Item
	var from []int // sent[i] is items[from[i]]
	for i := range items {
		if s.hits(Full) {
			items[i].Status = pool.Busy
			continue
		}
		it := items[i]
		if s.hits(FlipPut) {
			it.Data = bytes.Clone(it.Data) // the caller's bytes stay unchanged
			s.flip(FlipPut, it.Data)
		}
		sent, from = append(sent, it), append(from, i)
	}
	err := s.below.Put(ctx, sent)
	for i := range sent {
		items[from[i]].Status = sent[i].Status
	}
	return s.end(err)
}

// Get damages some of the store's answers.
func (s *Store) Get(ctx context.Context, items []pool.Item) error {
	if err := s.begin(ctx); err != nil {
		return err
	}
	if err := s.below.Get(ctx, items); err != nil {
		return err
	}
	for i := range items {
		if it := &items[i]; it.Status == pool.OK {
			s.spoil(it)
		}
	}
	return s.end(nil)
}

func (s *Store) spoil(it *pool.Item) {
	if s.hits(Short) {
		arrived := s.draw(Short, int64(len(it.Data))+1)
		clear(it.Data[arrived:])
		it.Status = pool.Corrupt
		return
	}
	if s.hits(Flip) {
		s.flip(Flip, it.Data)
	}
}

// Exists passes through to the store.
func (s *Store) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	if err := s.begin(ctx); err != nil {
		return err
	}
	return s.end(s.below.Exists(ctx, keys, status))
}

// Delete drops some of the keys.
func (s *Store) Delete(ctx context.Context, keys []pool.Key) error {
	if err := s.begin(ctx); err != nil {
		return err
	}
	var sent []pool.Key
	for i := range keys {
		if !s.hits(LostDelete) {
			sent = append(sent, keys[i])
		}
	}
	return s.end(s.below.Delete(ctx, sent))
}

// Usage returns that of the wrapped store.
func (s *Store) Usage() pool.Usage { return s.below.Usage() }

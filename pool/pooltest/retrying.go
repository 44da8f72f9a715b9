package pooltest

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// retrying wraps an unreliable store like a careful caller: it keeps a checksum of what it put, as
// memory does for tiers, retries what failed with a deadline for each try, reads back what it
// wrote, and deletes until the key is missing.
type retrying struct {
	below pool.Store
	t     testing.TB

	mu   sync.Mutex
	sums map[pool.Key]uint32
}

const (
	retryLimit = 200
	// until a running write is checked again, since its end is not reported
	retryPause    = 20 * time.Millisecond
	retryDeadline = 300 * time.Millisecond // of one try, beyond which it counts as hanging
)

func newPatient(t testing.TB, below pool.Store) *retrying {
	return &retrying{below: below, t: t, sums: map[pool.Key]uint32{}}
}

// again retries until f has no error, or the caller's context ends.
func (p *retrying) again(ctx context.Context, what string, f func(ctx context.Context) error) error {
	var err error
	for range retryLimit {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		try, cancel := context.WithTimeout(ctx, retryDeadline)
		err = f(try)
		cancel()
		if err == nil {
			return nil
		}
	}
	p.t.Errorf("%s fails %d times out of %d, at last with: %v", what, retryLimit, retryLimit, err)
	return err
}

func (p *retrying) Put(ctx context.Context, items []pool.Item) error {
	for i := range items {
		if err := p.put(ctx, &items[i]); err != nil {
			return err
		}
	}
	return nil
}

func (p *retrying) put(ctx context.Context, it *pool.Item) error {
	keys, status := []pool.Key{it.Key}, make([]pool.Status, 1)
	if err := p.Exists(ctx, keys, status); err != nil || status[0] == pool.OK {
		it.Status = pool.Exists
		return err
	}
	for range retryLimit {
		one := []pool.Item{*it}
		err := p.again(ctx, "put", func(ctx context.Context) error { return p.below.Put(ctx, one) })
		if err != nil {
			return err
		}
		if it.Status = one[0].Status; it.Status == pool.Busy {
			continue
		}
		if it.Status == pool.InProgress { // an earlier try, cut off by its deadline, is still being written
			time.Sleep(retryPause)
			continue
		}
		if it.Status != pool.OK && it.Status != pool.Exists {
			return nil
		}
		// It was missing before: an earlier try, or a concurrent caller, stored it.
		it.Status = pool.OK
		if right, err := p.readBack(ctx, it); err != nil || right {
			return err
		}
		if err := p.Delete(ctx, keys); err != nil {
			return err
		}
	}
	p.t.Errorf("put: busy, or wrong when read back, %d times", retryLimit)
	return nil
}

func (p *retrying) readBack(ctx context.Context, it *pool.Item) (right bool, err error) {
	p.mu.Lock()
	p.sums[it.Key] = pool.Sum(it.Key.Seed(uint32(len(it.Data))), it.Data)
	p.mu.Unlock()
	got := []pool.Item{{Key: it.Key, Data: make([]byte, len(it.Data))}}
	err = p.Get(ctx, got)
	return got[0].Status == pool.OK, err
}

func (p *retrying) Get(ctx context.Context, items []pool.Item) error {
	for i := range items {
		if err := p.get(ctx, items[i:i+1]); err != nil {
			return err
		}
	}
	return nil
}

const retryReads = 8 // of one item that arrives corrupt

func (p *retrying) get(ctx context.Context, one []pool.Item) error {
	for range retryReads {
		if err := p.again(ctx, "get", func(ctx context.Context) error { return p.below.Get(ctx, one) }); err != nil {
			return err
		}
		it := &one[0]
		if it.Status == pool.OK && !p.matches(it) {
			it.Status = pool.Corrupt
		}
		if it.Status != pool.Corrupt {
			return nil
		}
	}
	return nil
}

func (p *retrying) matches(it *pool.Item) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	sum, known := p.sums[it.Key]
	return known && sum == pool.Sum(it.Key.Seed(uint32(len(it.Data))), it.Data)
}

func (p *retrying) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	return p.again(ctx, "exists", func(ctx context.Context) error { return p.below.Exists(ctx, keys, status) })
}

func (p *retrying) Delete(ctx context.Context, keys []pool.Key) error {
	status := make([]pool.Status, len(keys))
	for range retryLimit {
		if err := p.again(
			ctx, "delete", func(ctx context.Context) error { return p.below.Delete(ctx, keys) },
		); err != nil {
			return err
		}
		if err := p.Exists(ctx, keys, status); err != nil || !contains(status, pool.OK) {
			return err
		}
	}
	p.t.Errorf("what is deleted is still there after %d tries", retryLimit)
	return nil
}

func contains(all []pool.Status, one pool.Status) bool {
	for _, s := range all {
		if s == one {
			return true
		}
	}
	return false
}

func (p *retrying) Usage() pool.Usage { return p.below.Usage() }

package pooltest

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// OpenStore makes an empty store for keys of the given spaces, with room for at least 64 KiB.
type OpenStore func(t testing.TB, specs ...pool.Spec) pool.Store

// TestStore tests the contract of pool.Store.
func TestStore(t *testing.T, open OpenStore) {
	for _, c := range []struct {
		name string
		test func(*testing.T, *shelf)
	}{
		{"WhatWasPutIsGot", testPutGet},
		{"FirstPutStays", testFirstPut},
		{"WrongLengthIsNotDelivered", testLength},
		{"KeysAreWhole", testWholeKeys},
		{"DeletedIsGone", testDelete},
		{"DataIsNotKept", testNotKept},
		{"EndedContextStops", testContext},
		{"BatchesAtOnce", testBatchesAtOnce},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &shelf{t: t, spec: model("store", 2, 1000), wide: model("wide", 1, 1000, 1000)}
			s.Store = open(t, s.spec, s.wide)
			c.test(t, s)
		})
	}
}

// shelf is a store and the two spaces it was opened for.
type shelf struct {
	pool.Store
	t          *testing.T
	spec, wide pool.Spec
}

func (s *shelf) item(i int) pool.Item {
	h := chain("item", i+1)
	it := pool.Item{Key: pool.Key{Space: s.spec.Fingerprint, Hash: pool.MakeHash(h.At(i))}, Data: make([]byte, 1000)}
	if i > 0 {
		it.Parent = pool.MakeHash(h.At(i - 1))
	}
	content(&it.Key, it.Data)
	return it
}

func (s *shelf) items(n int) (items []pool.Item) {
	for i := range n {
		items = append(items, s.item(i))
	}
	return items
}

func (s *shelf) status(items ...pool.Item) []pool.Status {
	s.t.Helper()
	keys, status := make([]pool.Key, len(items)), make([]pool.Status, len(items))
	for i := range items {
		keys[i], status[i] = items[i].Key, unset
	}
	if err := s.Exists(s.t.Context(), keys, status); err != nil {
		s.t.Fatal(err)
	}
	return status
}

func testPutGet(t *testing.T, s *shelf) {
	items := s.items(20)
	Want(t, s, pool.Missing, items...)
	Put(t, s, pool.OK, items...)
	Want(t, s, pool.OK, items...)
	for i, status := range s.status(append(items, s.item(20))...) {
		if want := map[bool]pool.Status{true: pool.OK, false: pool.Missing}[i < 20]; status != want {
			t.Fatalf("exists of item %d: %d, want %d", i, status, want)
		}
	}
	u := s.Usage()
	if u != (pool.Usage{}) && (u.Items != 20 || u.Bytes < 20*1000 || u.Capacity != 0 && u.Capacity < u.Bytes) {
		t.Fatalf("usage %+v with 20 items of 1,000 bytes", u)
	}
}

func testFirstPut(t *testing.T, s *shelf) {
	first, second := s.item(0), s.item(0)
	second.Data = make([]byte, 1000)
	Put(t, s, pool.OK, first)
	Put(t, s, pool.Exists, second)
	Want(t, s, pool.OK, first)
}

func testLength(t *testing.T, s *shelf) {
	it := s.item(0)
	Put(t, s, pool.OK, it)
	for _, n := range []int{0, 999, 1001} {
		it.Data = make([]byte, n)
		if got := Get(t, s, it); got[0] == pool.OK {
			t.Fatalf("1,000 bytes were put, and a get of %d is OK", n)
		}
	}
}

func testWholeKeys(t *testing.T, s *shelf) {
	it := s.item(0)
	Put(t, s, pool.OK, it)
	others := map[string]func(k *pool.Key){
		"group":       func(k *pool.Key) { k.Group = 1 },
		"hash":        func(k *pool.Key) { k.Hash.Bytes[31] ^= 1 },
		"hash length": func(k *pool.Key) { k.Hash.Len, k.Hash.Bytes[31] = 31, 0 },
		"space":       func(k *pool.Key) { k.Space = s.wide.Fingerprint },
	}
	for name, change := range others {
		other := it
		change(&other.Key)
		if got := Get(t, s, other); got[0] != pool.Missing {
			t.Errorf("a key with another %s: status %d, want Missing", name, got[0])
		}
	}
	for name, change := range map[string]func(k *pool.Key){
		"no hash": func(k *pool.Key) { k.Hash = pool.Hash{} }, "a hash too long": func(k *pool.Key) { k.Hash.Len = 33 },
	} {
		bad := []pool.Item{it}
		change(&bad[0].Key)
		if err := s.Put(t.Context(), bad); err != nil || bad[0].Status != pool.Invalid {
			t.Errorf("put with %s: status %d, %v; want Invalid", name, bad[0].Status, err)
		}
	}
}

func testDelete(t *testing.T, s *shelf) {
	items := s.items(4)
	Put(t, s, pool.OK, items...)
	if err := s.Delete(t.Context(), []pool.Key{items[1].Key, items[3].Key, s.item(9).Key}); err != nil {
		t.Fatal(err)
	}
	Want(t, s, pool.OK, items[0], items[2])
	Want(t, s, pool.Missing, items[1], items[3])
	Put(t, s, pool.OK, items[1])
}

func testNotKept(t *testing.T, s *shelf) {
	it := s.item(0)
	Put(t, s, pool.OK, it)
	clear(it.Data)
	Want(t, s, pool.OK, s.item(0)) // unless the store kept the caller's memory, not the bytes
}

func testContext(t *testing.T, s *shelf) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	items := s.items(3)
	if err := s.Put(ctx, items); !errors.Is(err, context.Canceled) {
		t.Fatalf("put after the context ended: %v", err)
	}
	if err := s.Get(ctx, items); !errors.Is(err, context.Canceled) {
		t.Fatalf("get after the context ended: %v", err)
	}
}

func testBatchesAtOnce(t *testing.T, s *shelf) {
	var workers sync.WaitGroup
	for k := range 8 {
		workers.Go(func() {
			for i := range 30 {
				it := s.item((i + k) % 20)
				if err := s.Put(t.Context(), []pool.Item{it}); err != nil {
					t.Error(err)
				}
				got := Empty([]pool.Item{it})
				if err := s.Get(t.Context(), got); err != nil {
					t.Error(err)
				}
				if got[0].Status == pool.OK && string(got[0].Data) != string(it.Data) {
					t.Error("other bytes than were put")
				}
			}
		})
	}
	workers.Wait()
}

package pooltest

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// Block returns block i, of n bytes, always with the same content.
func Block(i, n int) pool.Item {
	h := sha256.Sum256(fmt.Append(nil, i))
	it := pool.Item{Key: pool.Key{Space: pool.Fingerprint(h[:16]), Hash: pool.MakeHash(h[:])}, Data: make([]byte, n)}
	for j := range it.Data {
		it.Data[j] = byte(i + j*7 + j>>8)
	}
	return it
}

// Blocks returns n blocks, numbered from from.
func Blocks(from, n, bytes int) (items []pool.Item) {
	for i := range n {
		items = append(items, Block(from+i, bytes))
	}
	return items
}

// unset is the status of an item before a store has answered.
const unset pool.Status = 255

// Put stores items, and ends the test if one does not get the wanted status.
func Put(t testing.TB, s pool.Store, want pool.Status, items ...pool.Item) {
	t.Helper()
	for i := range items {
		items[i].Status = unset
	}
	if err := s.Put(t.Context(), items); err != nil {
		t.Fatal(err)
	}
	for i := range items {
		if items[i].Status != want {
			t.Fatalf("put %d: status %d, want %d", i, items[i].Status, want)
		}
	}
}

// Get returns the status of each item, and ends the test on wrong bytes.
func Get(t testing.TB, s pool.Store, items ...pool.Item) []pool.Status {
	t.Helper()
	out := Empty(items)
	if err := s.Get(t.Context(), out); err != nil {
		t.Fatal(err)
	}
	status := make([]pool.Status, len(out))
	for i := range out {
		if status[i] = out[i].Status; status[i] == pool.OK && !bytes.Equal(out[i].Data, items[i].Data) {
			t.Fatalf("block %d: WRONG BYTES", i)
		}
	}
	return status
}

// Empty returns items of the same keys and lengths for Get.
func Empty(items []pool.Item) []pool.Item {
	out := make([]pool.Item, len(items))
	for i := range items {
		out[i] = pool.Item{Key: items[i].Key, Data: make([]byte, len(items[i].Data)), Status: unset}
	}
	return out
}

// Want gets items, and ends the test if one has another status, or wrong bytes.
func Want(t testing.TB, s pool.Store, want pool.Status, items ...pool.Item) {
	t.Helper()
	for i, got := range Get(t, s, items...) {
		if got != want {
			t.Fatalf("block %d: status %d, want %d", i, got, want)
		}
	}
}

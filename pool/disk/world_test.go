package disk

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// blockOf returns block i: its key and its bytes follow from its number.
func blockOf(i, length int) pool.Item {
	var it pool.Item
	it.Key.Space = pool.Fingerprint{7}
	it.Key.Hash = pool.MakeHash(binary.LittleEndian.AppendUint64(nil, uint64(i)+1))
	it.Data = make([]byte, length)
	for j := 0; j < length; {
		j += copy(it.Data[j:], noise[(i*977+j/len(noise)*131)%(len(noise)/2):])
	}
	if length >= 8 {
		binary.LittleEndian.PutUint64(it.Data[length-8:], uint64(i))
	}
	return it
}

// noise is what blocks are cut from.
var noise = func() []byte {
	p := make([]byte, 128<<10)
	r := rand.New(rand.NewPCG(1, 2))
	for j := 0; j < len(p); j += 8 {
		binary.LittleEndian.PutUint64(p[j:], r.Uint64())
	}
	return p
}()

func keyOf(i int) pool.Key { it := blockOf(i, 0); return it.Key }

func put(t testing.TB, s *Store, items ...pool.Item) []pool.Status {
	t.Helper()
	if err := s.Put(t.Context(), items); err != nil {
		t.Fatalf("put: %v", err)
	}
	return statuses(items)
}

func statuses(items []pool.Item) (all []pool.Status) {
	for i := range items {
		all = append(all, items[i].Status)
	}
	return all
}

// get reads block i, and fails the test if a byte is wrong.
func get(t testing.TB, s *Store, i, length int) pool.Status {
	t.Helper()
	want := blockOf(i, length)
	got := []pool.Item{{Key: want.Key, Data: make([]byte, length)}}
	if err := s.Get(t.Context(), got); err != nil {
		t.Fatalf("get: %v", err)
	}
	if got[0].Status == pool.OK && !bytes.Equal(got[0].Data, want.Data) {
		t.Fatalf("block %d: wrong bytes", i)
	}
	return got[0].Status
}

func wantPut(t testing.TB, s *Store, from, to, length int) {
	t.Helper()
	for i := from; i < to; i++ {
		if st := put(t, s, blockOf(i, length)); st[0] != pool.OK {
			t.Fatalf("put of block %d: status %d", i, st[0])
		}
	}
}

func wantGet(t testing.TB, s *Store, i, length int, want pool.Status, why string) {
	t.Helper()
	if got := get(t, s, i, length); got != want {
		t.Fatalf("%s: block %d has status %d, want %d", why, i, got, want)
	}
}

func closeNow(t testing.TB, s *Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
}

func segmentFiles(t testing.TB, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.seg"))
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(files)
	return files
}

// crash copies what a killed process would leave: the current files.
func crash(t testing.TB, from string) string {
	t.Helper()
	to := t.TempDir()
	for _, f := range segmentFiles(t, from) {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(to, filepath.Base(f)), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return to
}

func newSeed(t testing.TB) uint64 {
	seed := rand.Uint64()
	if text := os.Getenv("KVAGENT_SEED"); text != "" {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatalf("KVAGENT_SEED: %v", err)
		}
		seed = n
	}
	t.Logf("KVAGENT_SEED=%d", seed)
	return seed
}

package redis

import (
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
)

// TestList expects every block under the prefix to be listed with its length, and nothing under
// another prefix, whatever characters the prefix has.
func TestList(t *testing.T) {
	server := servertest.Redis(t)
	s := openOn(t, Options{Addresses: []string{server.Addr}, Prefix: `a*[b]?\:`})
	other := openOn(t, Options{Addresses: []string{server.Addr}, Prefix: `axbz\:`})
	items := append(pooltest.Blocks(0, 2500, 100), pooltest.Block(2500, 320<<10))
	pooltest.Put(t, s, pool.OK, items...)
	pooltest.Put(t, other, pool.OK, pooltest.Block(9999, 100))
	got := map[pool.Key]int64{}
	if err := s.List(t.Context(), func(k pool.Key, bytes int64) bool { got[k] = bytes; return true }); err != nil {
		t.Fatal(err)
	}
	for i := range items {
		if n := got[items[i].Key]; n != int64(len(items[i].Data)) {
			t.Fatalf("block %d is listed with %d bytes, want %d", i, n, len(items[i].Data))
		}
	}
	if len(got) != len(items) {
		t.Errorf("%d blocks are listed, want %d", len(got), len(items))
	}
	n := 0
	if err := s.List(t.Context(), func(pool.Key, int64) bool { n++; return n < 5 }); err != nil || n != 5 {
		t.Errorf("%d blocks listed, of which 5 were wanted: %v", n, err)
	}
	server.Kill()
	if err := s.List(t.Context(), func(pool.Key, int64) bool { return true }); err == nil {
		t.Error("a list of a server that is gone")
	}
}

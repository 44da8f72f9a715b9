package redis

import (
	"fmt"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
)

// sent is the bytes that a server has sent to all its clients.
func (s *Store) sent(t *testing.T) int64 {
	t.Helper()
	info := s.command(t, "INFO", "stats")
	return number(infoFields(info)["total_net_output_bytes"])
}

func (s *Store) command(t *testing.T, c ...string) string {
	t.Helper()
	results, err := s.do(t.Context(), [][]string{c})
	if err != nil {
		t.Fatal(err)
	}
	text, err := results[0].ToString()
	if err != nil {
		return fmt.Sprint(results[0].String())
	}
	return text
}

// TestForeignValuesAreNotPulledIn expects a value, or a chunk, that another client made much larger
// than the block not to be read completely. It is damage, and the block can be stored again. So is
// an empty value.
func TestForeignValuesAreNotPulledIn(t *testing.T) {
	const huge, size = 64 << 20, 3 * MinChunkBytes
	server := servertest.Redis(t)
	s := openOn(t, Options{Addresses: []string{server.Addr}, ChunkBytes: MinChunkBytes})
	for i, make := range []func(it *pool.Item, name string){
		func(_ *pool.Item, name string) { s.command(t, "SETRANGE", name, fmt.Sprint(huge-1), "x") },
		func(it *pool.Item, name string) { // of ours up to its length
			pooltest.Put(t, s, pool.OK, *it)
			s.command(t, "SETRANGE", name, fmt.Sprint(huge-1), "x")
		},
		func(it *pool.Item, name string) {
			pooltest.Put(t, s, pool.OK, *it)
			results, err := s.do(t.Context(), [][]string{{"KEYS", name + "#*"}})
			if err != nil {
				t.Fatal(err)
			}
			chunks, err := results[0].AsStrSlice()
			if err != nil || len(chunks) != 2 {
				t.Fatalf("chunks %q, %v", chunks, err)
			}
			s.command(t, "SETRANGE", chunks[0], fmt.Sprint(huge-1), "x")
		},
		func(_ *pool.Item, name string) { s.command(t, "SET", name, "") },
	} {
		it := pooltest.Block(i, size)
		make(&it, s.name(&it.Key))
		before := s.sent(t)
		pooltest.Want(t, s, pool.Corrupt, it)
		if read := s.sent(t) - before; read > 2*size {
			t.Errorf("%d: %d bytes were read of a value of %d under the name of a block of %d", i, read, huge, size)
		}
		pooltest.Put(t, s, pool.OK, it)
		pooltest.Want(t, s, pool.OK, it)
	}
}

// TestForeignHeadIsUnlinked expects the chunks of a head that names 65,536 missing ones to be
// deleted in pipelines of bounded length.
func TestForeignHeadIsUnlinked(t *testing.T) {
	s := openOn(t, Options{Addresses: []string{servertest.Redis(t).Addr}})
	it := pooltest.Block(1, 100)
	w := writing{item: &it, name: s.name(&it.Key)}
	head := s.head(&w)[:headBytes]
	copy(head[8:], "\xff\xff\xff\xff")
	copy(head[pool.ValueHeader+nonceBytes:], "\x00\x00\x01\x00")
	s.command(t, "SET", w.name, string(head))
	if err := s.Delete(t.Context(), []pool.Key{it.Key}); err != nil {
		t.Fatal(err)
	}
	pooltest.Want(t, s, pool.Missing, it)
}

package redis

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
)

// sent is the bytes that a server has sent to all its clients.
func sent(t *testing.T, addr string) int64 {
	t.Helper()
	host, port, _ := net.SplitHostPort(addr)
	_, after, _ := strings.Cut(cli(t, "-h", host, "-p", port, "INFO", "stats"), "total_net_output_bytes:")
	line, _, _ := strings.Cut(after, "\r")
	n, err := strconv.ParseInt(line, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
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

// TestForeignValuesAreNotPulledIn expects a value that another client made much larger than the
// block not to be read completely. It is damage, and the block can be stored again.
func TestForeignValuesAreNotPulledIn(t *testing.T) {
	const huge, size = 64 << 20, 192 << 10
	server := servertest.Redis(t)
	s := openOn(t, Options{Addresses: []string{server.Addr}})
	for i, make := range []func(it *pool.Item, name string){
		func(_ *pool.Item, name string) { s.command(t, "SETRANGE", name, fmt.Sprint(huge-1), "x") },
		func(it *pool.Item, name string) { // of ours up to its length
			pooltest.Put(t, s, pool.OK, *it)
			s.command(t, "SETRANGE", name, fmt.Sprint(huge-1), "x")
		},
	} {
		it := pooltest.Block(i, size)
		make(&it, s.name(&it.Key))
		before := sent(t, server.Addr)
		pooltest.Want(t, s, pool.Corrupt, it)
		if err := s.Delete(t.Context(), []pool.Key{it.Key}); err != nil {
			t.Fatal(err)
		}
		if read := sent(t, server.Addr) - before; read > 2*size {
			t.Errorf("%d: %d bytes were read of a value of %d under the name of a block of %d", i, read, huge, size)
		}
		pooltest.Put(t, s, pool.OK, it)
		pooltest.Want(t, s, pool.OK, it)
	}
}

package mooncake

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/remote"
	"github.com/kvagent/kvagent/pool/servertest"
)

// brokenClients makes the first so many clients that are set up real ones whose transport moves
// nothing: they ask the master where a value goes or lies, and say -800 of each. It gives what to
// add to PYTHONPATH: Python runs sitecustomize before anything else.
func brokenClients(t *testing.T, clients int) string {
	t.Helper()
	dir := t.TempDir()
	const code = `
import os
try:
    import mooncake.store
except ImportError:
    mooncake = None

LEFT = os.path.join(os.path.dirname(__file__), "broken")

if mooncake:
    class Client(mooncake.store.MooncakeDistributedStore):
        broken = False

        def setup(self, *args):
            with open(LEFT) as file:
                left = len(file.read())
            self.broken = left > 0
            with open(LEFT, "w") as file:
                file.write("x" * (left - 1))
            return super().setup(*args)

        def batch_put_from_multi_buffers(self, keys, *rest):
            if self.broken:
                return [-800] * len(keys)
            return super().batch_put_from_multi_buffers(keys, *rest)

        def batch_get_into_multi_buffers(self, keys, *rest):
            if self.broken:
                return [-800] * len(keys)
            return super().batch_get_into_multi_buffers(keys, *rest)

    mooncake.store.MooncakeDistributedStore = Client
`
	if err := os.WriteFile(filepath.Join(dir, "sitecustomize.py"), []byte(code), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "broken"), []byte(strings.Repeat("x", clients)), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestClientMovesNothing expects a client that answers every question and moves no byte to be
// replaced, and so the next one, after twice as long; the third one works.
func TestClientMovesNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a store whose processes are killed")
	}
	t.Parallel()
	master, python := servertest.Mooncake(t)
	o := options(t, master, python)
	o.FailingFor = 200 * time.Millisecond
	o.Env[0] += ":" + brokenClients(t, 2)
	s := openWith(t, o)
	items := pooltest.Blocks(0, 2, 1000)
	began := time.Now()
	pooltest.Until(t, "two helpers are replaced", func() bool {
		if err := within(t, time.Second, func(ctx context.Context) error { return s.Put(ctx, items) }); err == nil &&
			items[0].Status == pool.OK {
			t.Fatalf("a block was stored by a client that moves none: %+v", s.Report())
		}
		_ = within(t, time.Second, func(ctx context.Context) error { // which the client answers
			return s.Exists(ctx, []pool.Key{items[0].Key}, make([]pool.Status, 1))
		})
		return s.count[countReplaced].Load() == 2
	})
	if took := time.Since(began); took < 600*time.Millisecond {
		t.Errorf("two helpers were replaced within %v, and are to be given 200 and 400 ms", took)
	}
	pooltest.Until(t, "the third is connected", func() bool { return s.State() == remote.OK })
	serves(t, s)
	if s.count[countReplaced].Load() != 2 || s.count[countStarts].Load() != 3 ||
		s.count[countDeaths].Load() != 0 || s.count[countKills].Load() != 0 {
		t.Errorf("two helpers of three were replaced, and none died: %+v", s.Report())
	}
	for _, c := range s.Report().Counts {
		if c.Name == "helpers_replaced" && c.N != 2 {
			t.Errorf("it says %d of itself", c.N)
		}
	}
}

func TestTransfers(t *testing.T) {
	at := time.Unix(0, 0)
	transfers := newTransfers(10 * time.Second)
	// tell records requests a second apart, and returns the number of the one at
	// which the helper is to go; 0: it stays.
	tell := func(n int, op operation, codes ...int64) int {
		for i := range n {
			at = at.Add(time.Second)
			if transfers.record(op, codes, at) {
				return i + 1
			}
		}
		return 0
	}
	want := func(why string, got, want int) {
		t.Helper()
		if got != want {
			t.Errorf("%s: replaced at request %d, want %d", why, got, want)
		}
	}
	want("a failure each second, from the first on for 10 s", tell(50, opPut, codeTransfer), 11)
	want("the next one has twice as long", tell(50, opGet, codeTransfer, codeNotFound), 21)
	want("the next", tell(50, opPut, 1, codeTransfer), 41)
	want("it has until then", tell(30, opPut, codeTransfer), 0)
	want("a value that was put", tell(1, opPut, codeTransfer, 0), 0)
	want("as in the beginning", tell(50, opPut, codeTransfer), 11)
	tell(10, opPut, codeTransfer)
	transfers.begin()
	want("another helper's failures are not this one's", tell(19, opPut, codeTransfer), 0)
	want("a value that was read", tell(1, opGet, codeTransfer, 32), 0)
	for _, code := range []int64{1, codeExists, codeNoRoom, codeNotFound, codeWrongLength, -900} {
		want("what says nothing of transfers", tell(50, opPut, code), 0)
	}
	want("neither good nor bad between failures",
		tell(10, opPut, codeTransfer)+tell(3, opGet, codeNotFound)+tell(1, opPut, codeTransfer), 1)
	at = at.Add(time.Hour)
	want("few requests", tell(1, opPut, codeTransfer), 0)
	at = at.Add(time.Hour)
	want("few requests, long ago", tell(failingRequests-2, opPut, codeTransfer), 0)
	want("enough of them", tell(1, opPut, codeTransfer), 1)
	for range 20 {
		at = at.Add(time.Hour)
		tell(1, opPut, codeTransfer)
		at = at.Add(lastFailingFor)
		want("no more than so long", tell(failingRequests, opPut, codeTransfer), failingRequests-1)
	}
}

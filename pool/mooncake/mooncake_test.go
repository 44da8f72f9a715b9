package mooncake

import (
	"crypto/sha256"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 30 * time.Second

// options of a store on a master.
func options(t testing.TB, master *servertest.Server, python string) Options {
	t.Helper()
	source, err := filepath.Abs("../../python")
	if err != nil {
		t.Fatal(err)
	}
	return Options{
		Master: master.Addr, Python: python, Env: []string{"PYTHONPATH=" + source}, Segment: 64 << 20, Bounce: 32 << 20,
		OnState: func(from, to State, reason error) { t.Logf("%v, was %v: %v", to, from, reason) },
	}
}

// openWith opens a store and waits until it is connected.
func openWith(t testing.TB, o Options) *Store {
	t.Helper()
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	until(t, "the store is connected", func() bool { return s.State() == StateOK })
	return s
}

func openOne(t testing.TB) (*Store, *servertest.Server) {
	t.Helper()
	master, python := servertest.Mooncake(t)
	return openWith(t, options(t, master, python)), master
}

func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", patience, what)
		}
		time.Sleep(5 * time.Millisecond) // another process: nothing to wait for
	}
}

func TestStore(t *testing.T) {
	pooltest.TestStore(t, func(t testing.TB, _ ...pool.Spec) pool.Store {
		s, _ := openOne(t)
		return s
	})
}

func TestFaultyStore(t *testing.T) {
	pooltest.TestFaultyStore(t, func(t testing.TB, _ ...pool.Spec) pool.Store {
		inner, _ := openOne(t)
		s, err := fault.New(inner, fault.Every(7, 0.04))
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}

func block(i, n int) pool.Item {
	h := sha256.Sum256(fmt.Append(nil, i))
	it := pool.Item{Key: pool.Key{Space: pool.Fingerprint(h[:16]), Hash: pool.MakeHash(h[:])}, Data: make([]byte, n)}
	for j := range it.Data {
		it.Data[j] = byte(i + j*7 + j>>8)
	}
	return it
}

func blocks(from, n, bytes int) (items []pool.Item) {
	for i := range n {
		items = append(items, block(from+i, bytes))
	}
	return items
}

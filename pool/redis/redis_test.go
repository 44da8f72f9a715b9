package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/remote"
	"github.com/kvagent/kvagent/pool/servertest"
)

// TestMain ignores what the library starts for a cluster, which ends within 5 s of its client.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/redis/rueidis.(*call).DelayDo.func1"),
		goleak.IgnoreAnyFunction("github.com/redis/rueidis.(*clusterClient)._refresh.func2"))
}

// openOn opens a store on a server, and waits until it is connected.
func openOn(t testing.TB, o Options) *Store {
	t.Helper()
	if o.Silence == 0 {
		o.Silence = time.Second
	}
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	pooltest.Until(t, "the store is connected", func() bool { return s.State() != remote.Lost })
	return s
}

func TestStore(t *testing.T) {
	pooltest.TestStore(t, func(t testing.TB, _ ...pool.Spec) pool.Store {
		return openOn(t, Options{Addresses: []string{servertest.Redis(t).Addr}})
	})
}

func TestFaultyStore(t *testing.T) {
	pooltest.TestFaultyStore(t, func(t testing.TB, _ ...pool.Spec) pool.Store {
		s, err := fault.New(openOn(t, Options{Addresses: []string{servertest.Redis(t).Addr}}), fault.Every(7, 0.04))
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}

// TestSizes stores values of one byte and of some MiB; a second store reads them.
func TestSizes(t *testing.T) {
	server := servertest.Redis(t)
	a := openOn(t, Options{Addresses: []string{server.Addr}, BatchBytes: 1 << 20})
	b := openOn(t, Options{Addresses: []string{server.Addr}})
	items := []pool.Item{pooltest.Block(1, 1), pooltest.Block(2, 1<<20), pooltest.Block(3, 3<<20)}
	pooltest.Put(t, a, pool.OK, items...)
	pooltest.Put(t, b, pool.Exists, items...)
	pooltest.Want(t, b, pool.OK, items...)
	keys := make([]pool.Key, len(items))
	for i := range items {
		keys[i] = items[i].Key
	}
	if err := b.Delete(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	pooltest.Want(t, a, pool.Missing, items...)
}

// TestRace lets many writers write a block. It expects the first to win, and its bytes to be read.
func TestRace(t *testing.T) {
	server := servertest.Redis(t)
	const writers, size = 8, 320 << 10
	it := pooltest.Block(1, size)
	var wins sync.Map
	var group sync.WaitGroup
	for w := range writers {
		s := openOn(t, Options{Addresses: []string{server.Addr}})
		group.Go(func() {
			mine := []pool.Item{{Key: it.Key, Data: make([]byte, size)}}
			for j := range mine[0].Data {
				mine[0].Data[j] = byte(w + j)
			}
			if err := s.Put(t.Context(), mine); err != nil {
				t.Error(err)
			}
			if mine[0].Status == pool.OK {
				wins.Store(w, mine[0].Data)
			}
		})
	}
	group.Wait()
	won := 0
	wins.Range(func(_, data any) bool {
		won++
		it.Data = data.([]byte)
		return true
	})
	if won != 1 {
		t.Fatalf("%d of %d writers were first", won, writers)
	}
	s := openOn(t, Options{Addresses: []string{server.Addr}})
	pooltest.Want(t, s, pool.OK, it)
}

// TestOtherLength expects a value of another length, or type, that another client wrote not to be
// delivered.
func TestOtherLength(t *testing.T) {
	server := servertest.Redis(t)
	s := openOn(t, Options{Addresses: []string{server.Addr}})
	for i, command := range [][]string{{"SET", "", "cut"}, {"LPUSH", "", "another type"}} {
		it := pooltest.Block(i, 192<<10)
		command[1] = s.name(&it.Key)
		if _, err := s.do(t.Context(), [][]string{command}); err != nil {
			t.Fatal(err)
		}
		pooltest.Want(t, s, pool.Corrupt, it)
		if err := s.Delete(t.Context(), []pool.Key{it.Key}); err != nil {
			t.Fatal(err)
		}
		pooltest.Put(t, s, pool.OK, it)
		pooltest.Want(t, s, pool.OK, it)
	}
}

// TestFull expects a server at its maxmemory to be a full tier: stored blocks are read, nothing
// more is stored until there is room again.
func TestFull(t *testing.T) {
	server := servertest.Redis(t, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
	var mu sync.Mutex
	var states []string
	s := openOn(t, Options{Addresses: []string{server.Addr}, OnState: func(from, to remote.State, _ error) {
		mu.Lock()
		defer mu.Unlock()
		states = append(states, to.String())
	}})
	var kept []pool.Item
	refused := 0
	for i := range 40 {
		items := pooltest.Blocks(i, 1, 512<<10)
		if err := s.Put(t.Context(), items); err != nil {
			t.Fatal(err)
		}
		switch items[0].Status {
		case pool.OK:
			kept = append(kept, items[0])
		case pool.Busy:
			refused++
		default:
			t.Fatalf("status %d", items[0].Status)
		}
	}
	if len(kept) == 0 || refused == 0 || s.State() != remote.Full || s.count[countFull].Load() == 0 {
		t.Fatalf("%d stored, %d refused, state %v, %+v", len(kept), refused, s.State(), s.Report())
	}
	pooltest.Want(t, s, pool.OK, kept...)
	for i := range kept {
		if err := s.Delete(t.Context(), []pool.Key{kept[i].Key}); err != nil {
			t.Fatal(err)
		}
	}
	pooltest.Put(t, s, pool.OK, pooltest.Block(1000, 512<<10))
	mu.Lock()
	defer mu.Unlock()
	// its connections' share of its memory comes and goes, so that there may be room in between
	got := strings.Join(states, " ")
	if !strings.HasPrefix(got, "ok full") || !strings.HasSuffix(got, "full ok") {
		t.Errorf("states %q, want ok first, full, and ok in the end", got)
	}
}

// TestServerFails stops, kills and restarts a server: every call returns when its context ends, and
// the store recovers by itself.
func TestServerFails(t *testing.T) {
	server := servertest.Redis(t)
	s := openOn(t, Options{Addresses: []string{server.Addr}, Silence: 300 * time.Millisecond})
	items := pooltest.Blocks(0, 32, 10_000)
	pooltest.Put(t, s, pool.OK, items...)

	server.Pause()
	for range 3 {
		hung(t, s, items)
	}
	if err := s.Get(t.Context(), pooltest.Blocks(0, 4, 10_000)); err == nil ||
		errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a get without a deadline from a stopped server: %v, "+
			"want an error that does not say that the caller's time is over", err)
	}
	server.Resume()
	pooltest.Until(t, "the server is asked again",
		func() bool { return s.Get(t.Context(), pooltest.Blocks(0, 1, 10_000)) == nil })
	pooltest.Want(t, s, pool.OK, items...)

	server.Kill()
	if err := s.Get(t.Context(), pooltest.Blocks(0, 4, 10_000)); err == nil {
		t.Error("a get from a server that was killed succeeds")
	}
	if s.State() != remote.Lost {
		t.Errorf("state %v, want lost", s.State())
	}
	server.Restart()
	pooltest.Until(t, "a put succeeds", func() bool { return s.Put(t.Context(), pooltest.Blocks(0, 1, 10_000)) == nil })
	pooltest.Want(t, s, pool.OK, items[0])
	pooltest.Want(t, s, pool.Missing, items[1])
	pooltest.Until(t, "state ok", func() bool { return s.State() == remote.OK })
}

// hung makes each call to a stopped server, with a deadline.
func hung(t *testing.T, s *Store, items []pool.Item) {
	t.Helper()
	// slack is for a busy machine; a call that waits for the server takes longer
	const limit, slack = 50 * time.Millisecond, 5 * time.Second
	keys, status := []pool.Key{items[0].Key}, make([]pool.Status, 1)
	for name, call := range map[string]func(context.Context) error{
		"put":    func(ctx context.Context) error { return s.Put(ctx, pooltest.Blocks(100, 4, 10_000)) },
		"get":    func(ctx context.Context) error { return s.Get(ctx, pooltest.Blocks(0, 4, 10_000)) },
		"exists": func(ctx context.Context) error { return s.Exists(ctx, keys, status) },
		"delete": func(ctx context.Context) error { return s.Delete(ctx, []pool.Key{pooltest.Block(500, 1).Key}) },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		start := time.Now()
		err := call(ctx)
		took := time.Since(start)
		cancel()
		if err == nil || took > limit+slack {
			t.Errorf("%s of a stopped server: %v after %v, want an error after %v", name, err, took, limit)
		}
	}
}

// TestServerComesLater expects a store whose server starts later to connect by itself.
func TestServerComesLater(t *testing.T) {
	server := servertest.Redis(t)
	server.Kill()
	s, err := Open(Options{Addresses: []string{server.Addr}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Put(t.Context(), pooltest.Blocks(0, 1, 10)); !errors.Is(err, ErrNotConnected) {
		t.Errorf("put without a server: %v", err)
	}
	server.Restart()
	pooltest.Until(t, "the store is connected", func() bool { return s.State() == remote.OK })
	pooltest.Put(t, s, pool.OK, pooltest.Block(0, 10))
}

// TestTimeToLive checks that a block expires, by default after a week, and that the marker of a
// reset never does: without it a node that was away would find what was reset.
func TestTimeToLive(t *testing.T) {
	server := servertest.Redis(t)
	hour := openOn(t, Options{Addresses: []string{server.Addr}, TTL: time.Hour})
	week := openOn(t, Options{Addresses: []string{server.Addr}, Prefix: "other:"})
	for store, most := range map[*Store]int64{hour: 3600, week: 7 * 24 * 3600} {
		it, marker := pooltest.Block(0, 1000), pooltest.Block(1, 80)
		marker.Key.Space = pool.EpochMarkers
		pooltest.Put(t, store, pool.OK, it, marker)
		left := func(key string) int64 {
			results, err := store.do(t.Context(), [][]string{{"TTL", key}})
			if err != nil {
				t.Fatal(err)
			}
			seconds, err := results[0].AsInt64()
			if err != nil {
				t.Fatal(err)
			}
			return seconds
		}
		if got := left(store.name(&it.Key)); got < most-100 || got > most {
			t.Errorf("a block lives %d s, want %d", got, most)
		}
		if got := left(store.name(&marker.Key)); got != -1 {
			t.Errorf("the marker of a reset lives %d s, want for ever (-1)", got)
		}
	}
}

func TestUserAndPassword(t *testing.T) {
	server := servertest.Redis(t, "--user", "default", "off", "--user", "kv", "on", ">secret", "~kvagent:*", "+@all")
	s := openOn(t, Options{Addresses: []string{server.Addr}, Username: "kv", Password: "secret"})
	pooltest.Put(t, s, pool.OK, pooltest.Block(0, 10))
	wrong, err := Open(Options{Addresses: []string{server.Addr}, Username: "kv", Password: "guess"})
	if err != nil {
		t.Fatal(err)
	}
	defer wrong.Close()
	pooltest.Until(t, "a refused connection is counted", func() bool { return wrong.count[countDials].Load() > 0 })
	if err := wrong.Put(t.Context(), pooltest.Blocks(0, 1, 10)); !errors.Is(err, ErrNotConnected) ||
		strings.Contains(err.Error(), "guess") {
		t.Errorf("put with a wrong password: %v", err)
	}
	other := openOn(t, Options{Addresses: []string{server.Addr}, Username: "kv", Password: "secret",
		Prefix: "forbidden:"})
	pooltest.Put(t, other, pool.Busy, pooltest.Block(0, 10))
	if other.count[countFailed].Load() == 0 {
		t.Error("a command without permission is not counted")
	}
}

func TestOptions(t *testing.T) {
	for name, o := range map[string]Options{
		"Addresses":  {},
		"host:port":  {Addresses: []string{"localhost"}},
		"MasterName": {Addresses: []string{"a:1"}, Mode: Sentinel},
		"Database":   {Addresses: []string{"a:1"}, Mode: Cluster, Database: 1},
		"Prefix":     {Addresses: []string{"a:1"}, Prefix: "{x}"},
	} {
		if s, err := Open(o); err == nil || !strings.Contains(err.Error(), name) ||
			!strings.Contains(err.Error(), "allowed") {
			t.Errorf("%s: %v, %v", name, s, err)
		}
	}
}

// TestServerEvicts has a server at its maxmemory that evicts blocks. It expects the others to be
// right, and the evicted ones to be missing and stored again.
func TestServerEvicts(t *testing.T) {
	server := servertest.Redis(t, "--maxmemory", "8mb", "--maxmemory-policy", "volatile-random")
	s := openOn(t, Options{Addresses: []string{server.Addr}})
	items := pooltest.Blocks(0, 120, 128<<10) // 16 MB
	for i := range items {
		pooltest.Put(t, s, pool.OK, items[i])
	}
	there := 0
	var gone []pool.Item
	for i, got := range pooltest.Get(t, s, items...) {
		switch got {
		case pool.OK:
			there++
		case pool.Missing:
			gone = append(gone, items[i])
		default:
			t.Errorf("block %d: status %d", i, got)
		}
	}
	t.Logf("%d of %d blocks are left, state %v, %+v", there, len(items), s.State(), s.Report())
	if len(gone) < 60 || there == 0 || s.count[countFull].Load() != 0 || s.State() != remote.OK {
		t.Errorf("%d of 120 blocks are gone, %d left, state %v, %+v: 16 MB in 8", len(gone), there, s.State(),
			s.Report())
	}
	pooltest.Put(t, s, pool.OK, gone[0])
	pooltest.Want(t, s, pool.OK, gone[0])
}

// TestRefusedIsNotMissing expects a key that the server does not return, though it has it, not to
// be taken for one that is gone: the caller would delete the block's other shards.
func TestRefusedIsNotMissing(t *testing.T) {
	server := servertest.Redis(t)
	s := openOn(t, Options{Addresses: []string{server.Addr}})
	items := pooltest.Blocks(0, 3, 1000)
	pooltest.Put(t, s, pool.OK, items...)
	allow := func(names ...string) {
		t.Helper()
		command := append([]string{"ACL", "SETUSER", "default", "resetkeys"}, names...)
		if _, err := s.do(t.Context(), [][]string{command}); err != nil {
			t.Fatal(err)
		}
	}
	allow("~"+s.name(&items[0].Key), "~"+s.name(&items[2].Key))
	if got := pooltest.Get(t, s, items...); !slices.Equal(got, []pool.Status{pool.OK, pool.Busy, pool.OK}) {
		t.Errorf("status %v, want OK, Busy, OK", got)
	}
	allow("~*")
	pooltest.Want(t, s, pool.OK, items...)
}

// TestPasswordChanges expects calls to fail after the password changed, and the store to recover by
// itself with the old one.
func TestPasswordChanges(t *testing.T) {
	server := servertest.Redis(t, "--user", "default", "on", ">admin", "~*", "+@all", "--user", "kv", "on", ">secret",
		"~kvagent:*", "+@all")
	admin := func(args ...string) {
		t.Helper()
		host, port, _ := net.SplitHostPort(server.Addr)
		cmd := exec.Command("redis-cli", append([]string{"-h", host, "-p", port, "--no-auth-warning", "-a", "admin"},
			args...)...)
		if out, err := cmd.CombinedOutput(); err != nil || strings.Contains(string(out), "ERR") {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	var mu sync.Mutex
	var told []string
	s := openOn(t, Options{Addresses: []string{server.Addr}, Username: "kv", Password: "secret",
		OnState: func(_, to remote.State, reason error) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, fmt.Sprint(to, " ", reason))
		}})
	it := pooltest.Block(0, 1000)
	pooltest.Put(t, s, pool.OK, it)
	admin("ACL", "SETUSER", "kv", "resetpass", ">rotated")
	admin("CLIENT", "KILL", "USER", "kv")
	pooltest.Until(t, "it is denied", func() bool {
		if err := s.Get(t.Context(), pooltest.Empty([]pool.Item{it})); err != nil {
			t.Logf("while the connection ends: %v", err)
		}
		return s.State() == remote.Denied
	})
	pooltest.Want(t, s, pool.Busy, it)
	pooltest.Put(t, s, pool.Busy, pooltest.Block(1, 1000))
	admin("ACL", "SETUSER", "kv", "resetpass", ">secret")
	pooltest.Until(t, "the old password serves again", func() bool { return pooltest.Get(t, s, it)[0] == pool.OK })
	if s.State() != remote.OK {
		t.Errorf("state %v, want ok", s.State())
	}
	mu.Lock()
	defer mu.Unlock()
	if text := strings.Join(told, "; "); strings.Contains(text, "secret") || strings.Contains(text, "rotated") ||
		!strings.Contains(text, "denied") {
		t.Errorf("told %q, want denied, and no password", text)
	}
}

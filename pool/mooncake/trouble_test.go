package mooncake

import (
	"context"
	"errors"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/remote"
	"github.com/kvagent/kvagent/pool/servertest"
)

// late is how much longer than its deadline a call may take on a busy machine.
const late = 200 * time.Millisecond

// arenaOf returns memory like the agent's staging.
func arenaOf(t testing.TB, bytes int64) Memory {
	t.Helper()
	m, err := newMemory(bytes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.close() })
	return m
}

// inArena moves the data of items into an arena, one after the other.
func inArena(m Memory, items []pool.Item) []pool.Item {
	at := 0
	for i := range items {
		n := len(items[i].Data)
		to := m.Base[at : at+n : at+n]
		copy(to, items[i].Data)
		items[i].Data = to
		at += (n + 4095) &^ 4095
	}
	return items
}

// within runs a call with a deadline, and fails if it ends later than a timer of the same deadline.
func within(t testing.TB, d time.Duration, call func(ctx context.Context) error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	woke := make(chan time.Time, 1)
	go func() {
		<-ctx.Done()
		woke <- time.Now()
	}()
	err := call(ctx)
	ended := time.Now()
	cancel()
	if over := ended.Sub(<-woke); over > late {
		t.Errorf("a call ended %v after its deadline of %v", over, d)
	}
	return err
}

// get fails on wrong bytes, and returns how many items were read.
func get(t *testing.T, s pool.Store, d time.Duration, items ...pool.Item) (came int, err error) {
	t.Helper()
	out := make([]pool.Item, len(items))
	for i := range items {
		out[i] = pool.Item{Key: items[i].Key, Data: make([]byte, len(items[i].Data))}
	}
	err = within(t, d, func(ctx context.Context) error { return s.Get(ctx, out) })
	for i := range out {
		if err != nil || out[i].Status != pool.OK {
			continue
		}
		if came++; string(out[i].Data) != string(items[i].Data) {
			t.Fatalf("block %d: wrong bytes", i)
		}
	}
	return came, err
}

// TestTwoNodesShare shares values of one byte and of many, in the arena and outside, more than a
// request holds, and one too large for the bounce memory, between two nodes.
func TestTwoNodesShare(t *testing.T) {
	t.Parallel()
	master, python := servertest.Mooncake(t)
	o := options(t, master, python)
	o.Arena = arenaOf(t, 64<<20)
	a := openWith(t, o)
	o.Arena, o.Segment = Memory{}, 0
	b := openWith(t, o)
	small := pooltest.Blocks(0, 300, 100)
	sizes := []pool.Item{pooltest.Block(1001, 1), pooltest.Block(1002, 3<<20)}
	inside := inArena(o0(a), pooltest.Blocks(2000, 8, 1<<20))
	for _, items := range [][]pool.Item{small, sizes, inside} {
		pooltest.Put(t, a, pool.OK, items...)
		pooltest.Put(t, b, pool.Exists, items...)
		if n, err := get(t, b, patience, items...); n != len(items) || err != nil {
			t.Fatalf("the other node got %d of %d: %v", n, len(items), err)
		}
	}
	if a.count[countInPlace].Load() != 8<<20 {
		t.Fatalf("%d bytes went in place, want %d", a.count[countInPlace].Load(), 8<<20)
	}
	pooltest.Put(t, a, pool.Busy, pooltest.Block(3000, 5<<20))
	got := inArena(o0(a), []pool.Item{{Key: inside[0].Key, Data: make([]byte, 1<<20)}})
	if err := a.Get(t.Context(), got); err != nil || got[0].Status != pool.OK ||
		string(got[0].Data) != string(pooltest.Block(2000, 1<<20).Data) {
		t.Fatalf("in place: status %d, %v, or wrong bytes", got[0].Status, err)
	}
	double := []pool.Item{pooltest.Block(4000, 10), pooltest.Block(4000, 10)}
	if err := a.Put(t.Context(), double); err != nil || double[0].Status != pool.OK || double[1].Status != pool.Exists {
		t.Fatalf("a key twice in a batch: %d and %d, %v", double[0].Status, double[1].Status, err)
	}
}

func o0(s *Store) Memory { return s.o.Arena }

// TestHelperDies kills and stops a helper during calls: no call outlives its deadline, no byte is
// wrong, and another helper starts.
func TestHelperDies(t *testing.T) {
	t.Parallel()
	for name, sig := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// seconds until a dead client's segment is given up
			master, python := servertest.Mooncake(t, "--client_ttl=1")
			o := options(t, master, python)
			o.Silence, o.Arena = 500*time.Millisecond, arenaOf(t, 8<<20)
			s := openWith(t, o)
			items := pooltest.Blocks(0, 20, 10_000)
			pooltest.Put(t, s, pool.OK, items...)
			signalHelper(t, s, sig)
			for _, d := range []time.Duration{30 * time.Millisecond, 100 * time.Millisecond} {
				_, _ = get(t, s, d, items...)
				_ = within(t, d, func(ctx context.Context) error {
					return s.Exists(ctx, []pool.Key{items[0].Key}, make([]pool.Status, 1))
				})
			}
			pooltest.Until(t, "another helper", func() bool {
				return s.count[countStarts].Load() >= 2 &&
					s.State() == remote.OK
			})
			serves(t, s)
			if s.count[countDeaths].Load() != 1 || sig == syscall.SIGSTOP && s.count[countKills].Load() != 1 {
				t.Fatalf("one helper died: %+v", s.Report())
			}
		})
	}
}

func signalHelper(t testing.TB, s *Store, sig syscall.Signal) {
	t.Helper()
	h, err := s.current()
	if err == nil {
		err = h.cmd.Process.Signal(sig)
	}
	if err != nil {
		t.Fatal(err)
	}
	if sig == syscall.SIGSTOP {
		servertest.AwaitStop(t, h.cmd.Process.Pid)
	}
}

// TestArenaInUse stops the helper until a get in place exceeds its deadline. It expects the caller
// to learn that its memory is in use until the helper has answered, which costs the helper nothing,
// or until it is killed and reaped.
func TestArenaInUse(t *testing.T) {
	for name, wakes := range map[string]bool{"slow": true, "hung": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			master, python := servertest.Mooncake(t, "--client_ttl=1")
			o := options(t, master, python)
			o.Arena = arenaOf(t, 8<<20)
			if !wakes {
				o.Silence = time.Second
			}
			s := openWith(t, o)
			items := inArena(o.Arena, pooltest.Blocks(0, 4, 1<<20))
			pooltest.Put(t, s, pool.OK, items...)
			h, err := s.current()
			if err != nil {
				t.Fatal(err)
			}
			signalHelper(t, s, syscall.SIGSTOP)
			err = within(t, 50*time.Millisecond, func(ctx context.Context) error { return s.Get(ctx, items) })
			var late *pool.InUse
			if !errors.As(err, &late) || !errors.Is(err, context.DeadlineExceeded) || s.count[countLate].Load() != 1 {
				t.Fatalf("get from a stopped helper: %v, %+v", err, s.Report())
			}
			select {
			case <-late.Done:
				t.Fatal("nobody uses the memory, and its helper may still write to it")
			default:
			}
			if wakes {
				signalHelper(t, s, syscall.SIGCONT)
			}
			select {
			case <-late.Done:
			case <-time.After(pooltest.WaitLimit):
				t.Fatal("the memory is in use for ever")
			}
			gone := false
			select {
			case <-h.reaped:
				gone = true
			default:
			}
			if gone == wakes {
				t.Errorf("the helper is gone: %v, %+v", gone, s.Report())
			}
			pooltest.Until(t, "the store works", func() bool { return s.State() == remote.OK })
			serves(t, s)
		})
	}
}

// TestMasterTrouble pauses, kills and restarts a master: calls end in time and nothing is wrong,
// and the store recovers. The helper is not replaced, since it is not at fault.
func TestMasterTrouble(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a store whose processes are killed")
	}
	t.Parallel()
	master, python := servertest.Mooncake(t)
	o := options(t, master, python)
	o.FailingFor = 100 * time.Millisecond
	s := openWith(t, o)
	items := pooltest.Blocks(0, 50, 10_000)
	pooltest.Put(t, s, pool.OK, items...)
	storm := func(what string) {
		for range 5 {
			_, _ = get(t, s, 100*time.Millisecond, items...)
			_ = within(t, 100*time.Millisecond, func(ctx context.Context) error {
				return s.Put(ctx, pooltest.Blocks(500, 4, 1000))
			})
		}
		t.Logf("%s: %v, %+v", what, s.State(), s.Report())
	}
	master.Pause()
	storm("paused")
	master.Resume()
	pooltest.Until(t, "all blocks after the pause", func() bool {
		n, err := get(t, s, time.Second, items...)
		return n == len(items) && err == nil
	})
	master.Kill()
	storm("killed")
	pooltest.Until(t, "it is lost", func() bool {
		_, _ = get(t, s, time.Second, items...)
		return s.State() == remote.Lost
	})
	master.Restart()
	serves(t, s)
	if s.count[countReplaced].Load() != 0 {
		t.Errorf("a helper was replaced for what the master did: %+v", s.Report())
	}
}

// serves waits until a store takes and returns blocks again.
func serves(t *testing.T, s *Store) {
	t.Helper()
	next := 1000
	pooltest.Until(t, "blocks are stored again", func() bool {
		items := pooltest.Blocks(next, 10, 1000)
		next += len(items)
		err := within(t, time.Second, func(ctx context.Context) error { return s.Put(ctx, items) })
		for i := range items {
			if err != nil || items[i].Status != pool.OK {
				return false
			}
		}
		n, err := get(t, s, time.Second, items...)
		return n == len(items) && err == nil
	})
}

// lamp tells of each change of a store's state.
type lamp struct {
	mu  sync.Mutex
	lit chan struct{} // closed with the next change; nil: nobody waits for it
}

// next returns a channel that is closed with the next change.
func (l *lamp) next() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lit == nil {
		l.lit = make(chan struct{})
	}
	return l.lit
}

func (l *lamp) changed() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lit != nil {
		close(l.lit)
		l.lit = nil
	}
}

// TestStormOfDeaths makes many calls while helpers are killed and stopped.
func TestStormOfDeaths(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a torture")
	}
	t.Parallel()
	master, python := servertest.Mooncake(t)
	o := options(t, master, python)
	var states lamp
	o.Silence, o.OnState = 300*time.Millisecond, func(remote.State, remote.State, error) { states.changed() }
	s := openWith(t, o)
	items := pooltest.Blocks(0, 60, 20_000)
	var workers sync.WaitGroup
	over := make(chan struct{})
	isOver := func() bool {
		select {
		case <-over:
			return true
		default:
			return false
		}
	}
	for w := range 4 {
		workers.Go(func() {
			for n := w; !isOver(); n++ {
				some := items[n%50 : n%50+10]
				_ = within(t, 100*time.Millisecond, func(ctx context.Context) error {
					mine := make([]pool.Item, len(some))
					copy(mine, some)
					return s.Put(ctx, mine)
				})
				_, _ = get(t, s, 100*time.Millisecond, some...)
				// a refusal takes no time: the next call comes with the next helper
				if next := states.next(); s.State() == remote.Lost {
					select {
					case <-next:
					case <-over:
					}
				}
			}
		})
	}
	const deaths = 6 // of helpers that had connected, half killed and half stopped until they are silent for too long
	var struck *helper
	for n := range uint64(deaths) {
		pooltest.Until(t, "a helper's death is counted", func() bool {
			// A helper may also be replaced before its death is seen: then the next one is struck.
			if h, err := s.current(); err == nil && h != struck && s.State() == remote.OK {
				_ = h.cmd.Process.Signal([]syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP}[n%2])
				struck = h
			}
			return s.count[countDeaths].Load() > n
		})
	}
	close(over)
	workers.Wait()
	if s.count[countDeaths].Load() < deaths {
		t.Fatalf("a storm without deaths: %+v", s.Report())
	}
}

// TestWhatIsMissing expects Open to return an error that names the missing part and how to install
// it.
func TestWhatIsMissing(t *testing.T) {
	t.Parallel()
	_, err := Open(Options{Master: "127.0.0.1:1", Python: "/nowhere/python3"})
	if err == nil || !strings.Contains(err.Error(), "pip install kvagent") {
		t.Errorf("no Python: %v", err)
	}
	_, err = Open(Options{Master: "127.0.0.1:1", Env: []string{"PYTHONPATH=/nowhere"}})
	if err == nil || !strings.Contains(err.Error(), "pip install") {
		t.Errorf("a Python without the package: %v", err)
	}
}

func TestOptions(t *testing.T) {
	for field, o := range map[string]Options{
		"Master": {}, "Protocol": {Master: "h:1", Protocol: "smoke"}, "Devices": {Master: "h:1", Devices: "mlx5_0"},
		"Bounce": {Master: "h:1", Bounce: 5}, "Host": {Master: "h:1", Host: "a b"},
	} {
		if _, err := Open(o); err == nil || !strings.Contains(err.Error(), field) ||
			!strings.Contains(err.Error(), "allowed") {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// TestRace lets two nodes write the same blocks at once. It expects the first to win, and both to
// read the same complete bytes and to write nothing more.
func TestRace(t *testing.T) {
	t.Parallel()
	master, python := servertest.Mooncake(t)
	o := options(t, master, python)
	nodes := [2]*Store{openWith(t, o), openWith(t, o)}
	const many, size = 40, 50_000
	written := [2][]pool.Item{pooltest.Blocks(0, many, size), pooltest.Blocks(0, many, size)}
	var all sync.WaitGroup
	for n, s := range nodes {
		for i := range written[n] {
			written[n][i].Data[0] = byte(n)
		}
		all.Go(func() {
			if err := s.Put(t.Context(), written[n]); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	for i := range many {
		var first [2]byte
		for n, s := range nodes {
			got := pooltest.Empty(written[0][i : i+1])
			if err := s.Get(t.Context(), got); err != nil || got[0].Status != pool.OK {
				t.Fatalf("block %d, node %d: status %d, %v", i, n, got[0].Status, err)
			}
			first[n] = got[0].Data[0]
			if string(got[0].Data[1:]) != string(written[0][i].Data[1:]) {
				t.Fatalf("block %d, node %d: WRONG BYTES", i, n)
			}
		}
		if first[0] != first[1] {
			t.Errorf("block %d: one node reads the bytes of node %d, the other those of node %d", i, first[0], first[1])
		}
	}
	for _, s := range nodes {
		pooltest.Put(t, s, pool.Exists, written[0]...)
	}
}

// TestSegmentLeaves expects Close to deregister the segment at the master at once, so that no node
// writes to missing memory.
func TestSegmentLeaves(t *testing.T) {
	t.Parallel()
	master, python := servertest.Mooncake(t)
	o := options(t, master, python)
	o.leave = 0
	capacity := func() string {
		answer, err := http.Get("http://" + master.Admin + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(regexp.MustCompile(`(?m)^master_total_capacity_bytes (\d+)$`).FindSubmatch(text)[1])
	}
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	pooltest.Until(t, "the store is connected", func() bool { return s.State() == remote.OK })
	if got := capacity(); got != "67108864" {
		t.Fatalf("the master has %s bytes, want 64 MiB", got)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if got := capacity(); got != "0" {
		t.Errorf("the store is closed, and the master has %s bytes", got)
	}
	http.DefaultClient.CloseIdleConnections()
}

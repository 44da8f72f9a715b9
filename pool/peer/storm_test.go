package peer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// TestStorm: two agents fetch from each other over connections that are cut, while blocks are
// saved, evicted and reset on both sides, transfers open, complete and expire, and servers are
// closed and started again. No wrong byte becomes visible, every block is counted, and nothing is
// left pinned, reserved or running.
func TestStorm(t *testing.T) { storms(t, 8<<20, nil) }

// TestStormOfReads is TestStorm with one-sided reads, some of which fail, hang for a moment, or
// bring other bytes.
func TestStormOfReads(t *testing.T) {
	memory := &network{}
	reads := storms(t, 64<<10, func(a *agent, number int, seed uint64) Reader {
		r := memory.reader(a, fmt.Sprint("side ", number), uint64(number+1)<<40)
		dice := rand.New(rand.NewPCG(seed, uint64(200+number)))
		var mu sync.Mutex
		roll := func(n int) int {
			mu.Lock()
			defer mu.Unlock()
			return dice.IntN(n)
		}
		r.before = func() error {
			for range roll(50) {
				runtime.Gosched()
			}
			if roll(100) == 0 {
				return errors.New("it failed")
			}
			return nil
		}
		r.after = func(pulls []pool.Pull, arena []byte) {
			if p := pulls[roll(len(pulls))]; roll(100) == 0 {
				arena[p.Offset+int64(roll(int(p.Length)))] ^= 1
			}
		}
		return r
	})
	if reads == 0 {
		t.Error("nothing was read")
	}
}

// storms runs a storm over connections that are cut after some bytes, and returns how many shards
// of blocks came by one-sided reads.
func storms(t *testing.T, cut int64, reader func(a *agent, number int, seed uint64) Reader) (reads uint64) {
	t.Helper()
	seed := testSeed(t)
	s := &storm{t: t}
	spec := specOf(2, 8192)
	for i := range s.sides {
		a := newAgent(t, 2<<20, spec) // few blocks, so that some are evicted
		a.t = quiet{t}
		side := &stormSide{agent: a, number: i}
		ccfg := a.clientConfig()
		ccfg.Log, ccfg.BreakFirst, ccfg.BreakLast = nil, 10*time.Millisecond, 10*time.Millisecond
		ccfg.BatchBytes, ccfg.WindowBytes = 64<<10, 1<<20
		if reader != nil {
			side.reader = reader(a, i, seed)
			ccfg.Reader = side.reader
		}
		dice := rand.New(rand.NewPCG(seed, uint64(100+i)))
		var mu sync.Mutex
		ccfg.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
			c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
			if err != nil {
				return nil, err
			}
			mu.Lock()
			defer mu.Unlock()
			left := &atomic.Int64{}
			left.Store(dice.Int64N(cut))
			return &mortal{c, left}, nil
		}
		side.client = newClient(t, ccfg)
		s.sides[i] = side
		s.restart(side)
	}
	var workers sync.WaitGroup
	for k := range 8 {
		workers.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(k)))
			for range stormSteps {
				s.step(r, s.sides[k%2], s.sides[1-k%2])
			}
		})
	}
	workers.Wait()
	for _, side := range s.sides {
		check(t, side.client.Close())
		check(t, side.server.Close())
		t.Logf("%+v", side.client.Stats())
		reads += side.client.Stats().Read
		if pinned := side.server.Stats().Pinned; pinned != 0 {
			t.Errorf("%d bytes are pinned for reads", pinned)
		}
		// Entries that lack a shard because of a reset or an eviction are reclaimed when their room
		// is needed.
		_, err := side.ResetSpace(side.space)
		check(t, err)
		side.Sweep()
	}
	t.Logf("%d fetches, %d of them lost, %d blocks compared", s.fetches.Load(), s.lost.Load(), s.compared.Load())
	if s.fetches.Load() == 0 || s.lost.Load() == 0 || s.compared.Load() == 0 {
		t.Error("the storm proves nothing")
	}
	return reads
}

const stormSteps = 120 // of each worker

type storm struct {
	t                       *testing.T
	sides                   [2]*stormSide
	fetches, lost, compared atomic.Int64
}

type stormSide struct {
	*agent
	number int
	client *Client
	reader Reader // nil: none

	mu     sync.Mutex
	server *Server
}

// quiet is a testing.TB that does not log: pools are used until the test has ended.
type quiet struct{ testing.TB }

func (quiet) Logf(string, ...any) {}

// mortal is a connection that breaks after some bytes.
type mortal struct {
	net.Conn
	left *atomic.Int64
}

func (m *mortal) Read(p []byte) (int, error) {
	n, err := m.Conn.Read(p)
	if m.left.Add(-int64(n)) < 0 {
		m.Close()
		return 0, errors.New("cut")
	}
	return n, err
}

// restart closes a side's server, if there is one, and starts another one.
func (s *storm) restart(side *stormSide) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Error(err)
		return
	}
	cfg := side.config()
	cfg.Log, cfg.Reader = nil, side.reader
	server, err := Serve(l, cfg)
	if err != nil {
		s.t.Error(err)
		return
	}
	side.mu.Lock()
	old := side.server
	side.server = server
	side.mu.Unlock()
	if old != nil {
		if err := old.Close(); err != nil {
			s.t.Error(err)
		}
	}
}

func (s *storm) addr(side *stormSide) string {
	side.mu.Lock()
	defer side.mu.Unlock()
	return side.server.Addr().String()
}

func (s *storm) step(r *rand.Rand, here, there *stormSide) {
	name := fmt.Sprint("t", r.IntN(6))
	h := chain(fmt.Sprint("c", r.IntN(10)), 30)
	h = h.Slice(0, 1+r.IntN(h.N))
	switch k := r.IntN(100); {
	case k < 30:
		here.save(h)
	case k < 45:
		here.set(name, State(r.IntN(3)), 0)
	case k < 46:
		s.restart(here)
	case k < 47:
		if _, err := here.ResetSpace(here.space); err != nil {
			s.t.Error(err)
		}
		here.Sweep()
	case k < 57:
		s.compared.Add(int64(here.has(h)))
	default:
		s.fetch(r, here, there, name, h)
	}
}

func (s *storm) fetch(r *rand.Rand, here, there *stormSide, name string, h pool.Hashes) {
	req := here.request(name, h)
	req.Wait, req.Early = time.Duration(r.IntN(20))*time.Millisecond, r.IntN(2) == 0
	ctx, cancel := context.WithCancel(s.t.Context())
	defer cancel()
	stop := r.IntN(40)
	n := 0
	got, err := fetchWith(ctx, s.t, here.client, s.addr(there), req, func(blocks int, _ int64) {
		if n += blocks; n > stop {
			cancel()
		}
	})
	s.fetches.Add(1)
	if errors.Is(err, ErrLost) {
		s.lost.Add(1)
	}
	if got.Failed[Corrupt] != 0 || got.Failed[Invalid] != 0 || got.Failed[BadPage] != 0 {
		s.t.Errorf("%+v, %v", got, err)
	}
}

// testSeed returns a seed, which KVAGENT_SEED repeats.
func testSeed(t *testing.T) uint64 {
	t.Helper()
	seed := rand.Uint64()
	if text := os.Getenv("KVAGENT_SEED"); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		check(t, err)
	}
	t.Logf("KVAGENT_SEED=%d", seed)
	return seed
}

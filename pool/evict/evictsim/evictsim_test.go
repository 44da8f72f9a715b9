package evictsim

import (
	"os"
	"slices"
	"testing"

	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/trace/tracetest"
)

// full enables the runs that take minutes.
func full() bool { return os.Getenv("KVAGENT_POLICY_FULL") != "" }

func readConversation(t *testing.T) *Stream {
	s, err := ReadTrace(tracetest.Conversation(t))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestConversation compares the default policy with recorded figures. With KVAGENT_POLICY_FULL set,
// at three capacities and with six seeds of the hashes of keys.
func TestConversation(t *testing.T) {
	s := readConversation(t)
	seeds := uint64(1)
	if full() {
		seeds = 6
	}
	for _, c := range []struct {
		capacity int
		least    float64
	}{{3000, 0.1345}, {10000, 0.235}, {30000, 0.334}} {
		if c.capacity != 3000 && !full() {
			continue
		}
		for s.HashSeed = range seeds {
			r := Run(s, evict.NewHazard(), c.capacity)
			t.Logf(
				"%d blocks, hash seed %d: %.4f, %d ns a block", c.capacity, s.HashSeed, r.HitRate(),
				r.PerAccess().Nanoseconds(),
			)
			if r.HitRate() < c.least {
				t.Errorf(
					"%d blocks, hash seed %d: hit rate %.4f, must be %.4f", c.capacity, s.HashSeed, r.HitRate(),
					c.least,
				)
			}
		}
	}
}

// TestAgents compares the default policy with recorded figures on sessions of coding agents, of
// which one that paused has likely ended: its last gap tells, its age does not.
func TestAgents(t *testing.T) {
	s, err := ReadTrace(tracetest.Agents(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		capacity int
		least    float64
	}{{2500, 0.56}, {5000, 0.827}, {10000, 0.932}} {
		r := Run(s, evict.NewHazard(), c.capacity)
		t.Logf("%d blocks: %.4f, %d ns a block", c.capacity, r.HitRate(), r.PerAccess().Nanoseconds())
		if r.HitRate() < c.least {
			t.Errorf("%d blocks: hit rate %.4f, must be %.4f", c.capacity, r.HitRate(), c.least)
		}
	}
}

// TestReferences compares exact LRU and the optimum with what is known of the trace.
func TestReferences(t *testing.T) {
	s := readConversation(t)
	for _, c := range []struct {
		capacity int
		lru, opt float64
	}{{3000, 0.065, 0.2945}, {10000, 0.211, 0.3664}} {
		if c.capacity != 3000 && !full() {
			continue
		}
		lru, opt := LRU(s, c.capacity).HitRate(), Optimum(s, c.capacity).HitRate()
		if lru < c.lru-0.001 || lru > c.lru+0.001 || opt < c.opt-0.001 || opt > c.opt+0.001 {
			t.Errorf("%d blocks: LRU %.4f, optimum %.4f; known are %.4f and %.4f", c.capacity, lru, opt, c.lru, c.opt)
		}
	}
}

// edgy are the workloads on which the policy came nearest to the bound of its losses.
var edgy = []string{"lru", "flipedge", "loopscan7", "huge", "fewlong", "batch", "uniform", "sliding", "pingpong"}

// mayBeBelow bounds the hits that the policy may have fewer than LRU after each request: this share
// of the blocks looked up, and this part of the capacity, which is lent at the start.
const (
	mayBeBelow = 0.01
	lent       = 8
)

// TestNotBelowLRU checks the bound for any workload, after each request. With KVAGENT_POLICY_FULL
// set, for all workloads, five seeds and capacities from a third of what the bound is for.
func TestNotBelowLRU(t *testing.T) {
	capacities, seeds := []int{1000, 7000}, []uint64{3}
	if full() {
		capacities, seeds = []int{300, 1000, 3000, 7000, 10_000, 30_000, 100_000}, []uint64{1, 2, 3, 4, 5}
	}
	for _, w := range Workloads {
		if !full() && !slices.Contains(edgy, w.Name) {
			continue
		}
		t.Run(w.Name, func(t *testing.T) {
			t.Parallel()
			for _, seed := range seeds {
				s := w.Make(seed)
				for _, c := range capacities {
					notBelowLRU(t, s, seed, c)
				}
			}
		})
	}
}

// notBelowLRU runs a stream once, since a policy does not know the future, and checks the bound
// after each request.
func notBelowLRU(t *testing.T, s *Stream, seed uint64, capacity int) {
	h := evict.NewHazard()
	d, l := newDriver(s, h, capacity), newExactLRU(s, capacity)
	worst, at := 0., 0
	for i := range s.Requests {
		d.request(&s.Requests[i])
		l.request(&s.Requests[i])
		ahead := d.result.Hits - l.result.Hits + capacity/lent
		if ahead := float64(ahead) / float64(max(1, d.result.Blocks)); ahead < worst {
			worst, at = ahead, d.result.Blocks
		}
	}
	t.Logf("seed %d, %6d blocks: LRU %.4f, hazard %+.4f, at worst %+.5f after %d blocks looked up", seed, capacity,
		l.result.HitRate(), d.result.HitRate()-l.result.HitRate(), worst, at)
	if worst < -mayBeBelow {
		t.Errorf(
			"seed %d, %d blocks: after %d blocks looked up the hits are %.5f below LRU's and what is lent", seed,
			capacity, at, -worst,
		)
	}
	if largest(s) <= capacity {
		shadowIsLRU(t, s, h, seed, capacity)
	}
}

// shadowIsLRU checks that the shadow's hits are between those of exact LRU with two grains of room
// less and more.
func shadowIsLRU(t *testing.T, s *Stream, h *evict.Hazard, seed uint64, capacity int) {
	grain := max(1, capacity/128)
	least, most := LRU(s, capacity-2*grain).Hits, LRU(s, capacity+2*grain).Hits
	if got := int(h.Report().ShadowHits); got < least || got > most {
		t.Errorf("seed %d, %d blocks: the shadow LRU has %d hits, exact LRU %d with %d blocks less and %d with so "+
			"many more",
			seed, capacity, got, least, 2*grain, most)
	}
}

// largest is the blocks of the largest request. Of one larger than the pool, pool and LRU keep
// different parts for a moment.
func largest(s *Stream) (n int) {
	for i := range s.Requests {
		n = max(n, len(s.Requests[i].Blocks))
	}
	return n
}

// TestPolicyLRUIsExact compares LRU as a policy with the slow one.
func TestPolicyLRUIsExact(t *testing.T) {
	for _, w := range Workloads[2:3] {
		s := w.Make(5)
		for _, c := range []int{500, 5000} {
			if got, want := Run(s, evict.NewLRU(), c).HitRate(), LRU(s, c).HitRate(); got < want-0.0005 ||
				got > want+0.0005 {
				t.Errorf("%s, %d blocks: %.5f, exact LRU has %.5f", w.Name, c, got, want)
			}
		}
	}
}

func BenchmarkHazard(b *testing.B) {
	benchmark(b, func(s *Stream) Result { return Run(s, evict.NewHazard(), 10000) })
}
func BenchmarkLRU(b *testing.B) {
	benchmark(b, func(s *Stream) Result { return Run(s, evict.NewLRU(), 10000) })
}

func benchmark(b *testing.B, run func(*Stream) Result) {
	s := Workloads[4].Make(1)
	for b.Loop() {
		b.ReportMetric(float64(run(s).PerAccess().Nanoseconds()), "ns/block")
	}
}

package evictsim

import (
	"fmt"
	"math/rand/v2"
	"os"
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

func readAgents(t *testing.T) *Stream {
	s, err := ReadTrace(tracetest.Agents(t))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestTraces compares the default policy with recorded figures, without and with what it is told.
func TestTraces(t *testing.T) {
	for _, c := range []struct {
		trace, told string
		capacity    int
		least       float64
	}{
		{"conversation", "", 3000, 0.14}, {"conversation", "", 10000, 0.235}, {"conversation", "", 30000, 0.334},
		{"conversation", "facts", 3000, 0.138}, {"conversation", "facts", 10000, 0.2335},
		{"agents", "", 2500, 0.585}, {"agents", "", 5000, 0.8285}, {"agents", "", 10000, 0.934},
		{"agents", "facts", 2500, 0.592}, {"agents", "facts", 5000, 0.833}, {"agents", "facts", 10000, 0.9335},
		{"agents", "hints", 2500, 0.66}, {"agents", "hints", 5000, 0.865},
		{"agents", "lies", 2500, 0.585}, {"agents", "lies", 5000, 0.825}, {"conversation", "lies", 3000, 0.14},
		{"agents", "noise", 2500, 0.583}, {"agents", "noise", 5000, 0.825}, {"conversation", "noise", 3000, 0.137},
	} {
		t.Run(fmt.Sprintf("%s/%s/%d", c.trace, c.told, c.capacity), func(t *testing.T) {
			s := readAgents(t)
			if c.trace == "conversation" {
				s = readConversation(t)
			}
			switch c.told {
			case "facts":
				s = s.WithFacts()
			case "hints":
				s = s.WithHints(0.9, 0.9, 1)
			case "lies":
				s = s.WithHints(0, 1, 1)
			case "noise":
				s = noisy(s)
			}
			r := Run(s, evict.NewHazard(), c.capacity)
			t.Logf("%.4f, %d ns a block", r.HitRate(), r.PerAccess().Nanoseconds())
			if r.HitRate() < c.least {
				t.Errorf("hit rate %.4f, must be %.4f", r.HitRate(), c.least)
			}
		})
	}
}

// noisy returns a stream in which each request is given a wish that has nothing to do with it.
func noisy(s *Stream) *Stream {
	random := rand.New(rand.NewPCG(1, 13))
	told := *s
	for i := range s.Requests {
		end := s.Requests[i].end()
		told.Told = append(told.Told, Told{
			Millis: end, Request: i, Priority: uint8(random.IntN(101)), Until: end + random.Int64N(soon),
		})
	}
	return told.inOrder()
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

// mayBeBelow bounds how far the hit rate may be below LRU's at the end of any stream.
const mayBeBelow = 0.005

// worse is a workload of which the policy learns something that is not true later, and how much
// farther below LRU it is for that: LRU is the best choice for it.
var worse = map[string]float64{"pingpong": 0.01}

// TestNotBelowLRU compares the hits at the end of each generated workload with those of exact LRU.
func TestNotBelowLRU(t *testing.T) {
	for _, w := range Workloads {
		t.Run(w.Name, func(t *testing.T) {
			t.Parallel()
			s := w.Make(3)
			for _, capacity := range []int{1000, 3000, 10_000, 30_000} {
				r := Run(s, evict.NewHazard(), capacity)
				if r.Stuck > 0 {
					t.Errorf("%d blocks: %d requests found nothing to evict", capacity, r.Stuck)
				}
				own, lru := r.HitRate(), LRU(s, capacity).HitRate()
				t.Logf("%6d blocks: LRU %.4f, hazard %+.4f", capacity, lru, own-lru)
				if own < lru-mayBeBelow-worse[w.Name] {
					t.Errorf("%d blocks: hit rate %.4f, LRU has %.4f", capacity, own, lru)
				}
			}
		})
	}
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

// TestSaved compares the hits that the policy says wishes have saved with those that they have
// gained: of a run without, none.
func TestSaved(t *testing.T) {
	s := readAgents(t)
	policy := evict.NewHazard()
	gained := Run(s.WithHints(1, 1, 1), policy, 2500).Hits - Run(s, evict.NewHazard(), 2500).Hits
	if saved := int(policy.Report().Saved); saved < gained/2 || saved > gained*2 {
		t.Errorf("%d hits saved, gained %d", saved, gained)
	}
}

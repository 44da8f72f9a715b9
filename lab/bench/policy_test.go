package bench

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"encoding/xml"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/advisor"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/pool/evict/evictsim"
)

// policyTrace is a file with three conversations in turn, whose requests all begin alike.
func policyTrace(t *testing.T) string {
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	var trace bytes.Buffer
	for i := range 600 {
		ids := []int{0}
		for j := range 1 + i/30 {
			ids = append(ids, 1000*(i%3+1)+j)
		}
		if err := json.NewEncoder(&trace).Encode(map[string]any{"timestamp": 1000 * i, "hash_ids": ids}); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(file, trace.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestPlotOfPolicies draws a plot, and reads it as XML: a line for each policy.
func TestPlotOfPolicies(t *testing.T) {
	file := filepath.Join(t.TempDir(), "plot.svg")
	cmd := policyCommand()
	cmd.SetArgs([]string{"--trace", policyTrace(t), "--plot", file, "--capacity-blocks", "40,10,20"})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var plot struct {
		Lines []struct {
			Points string `xml:"points,attr"`
		} `xml:"polyline"`
	}
	if err := xml.Unmarshal(b, &plot); err != nil {
		t.Fatal(err)
	}
	if len(plot.Lines) != 8 {
		t.Fatalf("%d lines, want 8", len(plot.Lines))
	}
	for i, line := range plot.Lines {
		if points := strings.Fields(line.Points); len(points) != 3 || !strings.HasPrefix(points[0], "60.0,") {
			t.Errorf("line %d has the points %q, want 3 from the left to the right", i, line.Points)
		}
	}
}

// TestBenchPolicyBesideItsBounds holds the pool's real code and the simulation between LRU and the
// optimum.
func TestBenchPolicyBesideItsBounds(t *testing.T) {
	figures(t)
	t.Parallel()
	s, err := evictsim.ReadTrace(policyTrace(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, capacity := range []int{1, 10, 40, 1000} {
		r := measurePolicy(s, capacity, 1)
		for _, name := range evict.Names {
			hits, err := poolHits(s, name, capacity)
			if err != nil {
				t.Fatal(err)
			}
			for _, rate := range []float64{float64(hits) / float64(s.Looked()), r.Policies[name]} {
				if rate > r.Opt+1e-9 || r.LRU > r.Opt+1e-9 || rate < r.LRU-0.02 {
					t.Errorf("capacity %d: %s %.4f, LRU %.4f, optimum %.4f", capacity, name, rate, r.LRU, r.Opt)
				}
			}
		}
		if r.HitRate != r.Policies[evict.DefaultName] || r.PerAccess <= 0 {
			t.Errorf("capacity %d: %+v", capacity, r)
		}
	}
}

// TestPoolDoesAsTheSimulation compares the pool's real code with the simulation on a generated
// workload.
func TestPoolDoesAsTheSimulation(t *testing.T) {
	figures(t)
	t.Parallel()
	s := evictsim.Workloads[4].Make(3)
	for _, eviction := range evict.Names {
		hits, err := poolHits(s, eviction, 4000)
		if err != nil {
			t.Fatal(err)
		}
		got, want := float64(hits)/float64(s.Looked()), evictsim.Run(s, evict.Named(eviction), 4000).HitRate()
		t.Logf("%s: pool %.4f, simulation %.4f", eviction, got, want)
		if got < want-0.005 || got > want+0.005 {
			t.Errorf("%s: hit rate in the pool %.4f, in the simulation %.4f", eviction, got, want)
		}
	}
}

func TestBenchPolicyOutput(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a benchmark")
	}
	file := policyTrace(t)
	run := func(args ...string) (string, error) {
		cmd := policyCommand()
		var out bytes.Buffer
		cmd.SetOut(&out)
		cmd.SetErr(&out)
		cmd.SetArgs(args)
		err := cmd.Execute()
		return out.String(), err
	}
	text, err := run("--trace", file, "--capacity-blocks", "20", "--json")
	if err != nil {
		t.Fatal(err)
	}
	var one map[string]any
	if err := json.Unmarshal([]byte(text), &one); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"hit_rate", "lru", "opt", "policies", "ns_per_access"} {
		if _, ok := one[key]; !ok {
			t.Errorf("no %s in %s", key, text)
		}
	}
	text, err = run("--trace", file, "--capacity-blocks", "20,40")
	if lines := strings.Count(text, "\n"); err != nil || lines != 3 {
		t.Errorf("%d lines for two capacities, error %v:\n%s", lines, err, text)
	}
	if err := os.WriteFile(file, []byte("{\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bad := range [][]string{
		{"--trace", file}, {}, {"--workload", "nosuch"},
		{"--workload", "chat", "--capacity-blocks", "0"},
	} {
		if _, err := run(bad...); err == nil {
			t.Errorf("%v was accepted", bad)
		}
	}
}

// poolHits replays a stream through look-up, reservation and commit.
func poolHits(s *evictsim.Stream, eviction string, capacity int) (hits int, err error) {
	// A slab holds one block, so that exactly as many fit as asked for.
	slab := int64(dram.MinSlabBytes)
	for slab*int64(capacity) < dram.MinBytes {
		slab *= 2
	}
	clock := &streamClock{}
	p, err := dram.Open(dram.Options{
		Bytes: slab * int64(capacity), SlabBytes: slab, Virtual: true, Clock: clock.now,
		Advisor:  advisor.New(evict.Named(eviction), clock.now),
		HashSeed: cmp.Or(s.HashSeed, defaultPolicySeed),
	})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	space, err := p.OpenSpace(pool.Spec{
		Identity: []byte("policy"), Shards: 1,
		Groups: []pool.Group{{BlockTokens: evictsim.BlockTokens, ShardBytes: []uint32{uint32(slab)}}},
	})
	if err != nil {
		return 0, err
	}
	for i := range s.Requests {
		clock.at.Store(s.Requests[i].Millis)
		hits += playRequest(p, space, s.Requests[i].Blocks)
	}
	return hits, nil
}

// playRequest looks a prompt up, stores what is missing, and returns the blocks that were there.
func playRequest(p *dram.Pool, space pool.SpaceID, blocks []uint32) int {
	h := policyHashes(blocks)
	n := p.Prefix(space, 0, h)
	b := pool.Batch{Space: space, Epoch: 1, Hashes: h.Slice(n, h.N)}
	if n > 0 {
		b.Parent = h.At(n - 1)
	}
	b.Status, b.Slots = make([]pool.Status, b.Hashes.N), make([]pool.Slot, b.Hashes.N)
	p.Reserve(&b)
	p.Commit(b.Slots, b.Epoch, b.Status)
	return n
}

func policyHashes(blocks []uint32) pool.Hashes {
	blob := make([]byte, 0, 8*len(blocks))
	for _, id := range blocks {
		blob = binary.LittleEndian.AppendUint64(blob, uint64(id))
	}
	return pool.Chain(blob, 8)
}

// streamClock is the time of the request being played; the pool's goroutines read it too.
type streamClock struct{ at atomic.Int64 } // ms

func (c *streamClock) now() time.Time { return time.UnixMilli(c.at.Load()) }

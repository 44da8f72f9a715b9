package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/pool/evict/evictsim"
)

// policyReport has the prefix hits of a stream as a share of its blocks, at one capacity.
type policyReport struct {
	Stream   string             `json:"stream"`
	Capacity int                `json:"capacity_blocks"`
	HitRate  float64            `json:"hit_rate"`  // the default policy
	LRU      float64            `json:"lru"`       // exact LRU
	Opt      float64            `json:"opt"`       // Belady's optimum
	BelowLRU float64            `json:"below_lru"` // lru less hit_rate; negative is better than LRU
	Policies map[string]float64 `json:"policies"`
	// Processor time of a simulation with the policy per block looked up, its index and chains with
	// it, ns: of each part of the stream the least of some runs. The same with LRU as the policy.
	PerAccess    int64 `json:"ns_per_access"`
	PerAccessLRU int64 `json:"lru_ns_per_access"`
}

const (
	maxPolicyBlocks    = 10_000_000
	defaultPolicyBlock = 10_000
	defaultPolicySeed  = 1
)

// policySettings are the settings of bench policy.
type policySettings struct {
	trace      string
	workload   string
	seed       uint64
	capacities []int
	json       bool
}

func policyCommand() *cobra.Command {
	s := policySettings{
		capacities: []int{defaultPolicyBlock}, seed: defaultPolicySeed,
	}
	cmd := &cobra.Command{
		Use:   "policy [--trace FILE] [--workload NAME]",
		Short: "Compare the hit rate of the pool's eviction on a trace with LRU and the optimum",
		Long: `Replays a trace (one JSON object a line, with timestamp and hash_ids), or a generated workload,
against the pool's eviction policies, with --capacity-blocks blocks. Each request hits the leading
blocks that are stored, and then all its blocks are stored. Time is the trace's. Of several
streams as many run concurrently as there are cores; ns/access, which is processor time, is then
measured with shared caches.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return s.run(cmd.OutOrStdout()) },
	}
	f := cmd.Flags()
	f.BoolVar(&s.json, "json", false, "print one JSON object; of several capacities or workloads, its rows")
	f.StringVar(&s.trace, "trace", "", "trace file in Mooncake's format")
	f.StringVar(&s.workload, "workload", "", "generated workload, or all")
	f.Uint64Var(&s.seed, "seed", s.seed,
		"seed of generated workloads, and of the hashes of keys, on which the default policy depends a little; "+
			"for these 0 means 1")
	f.IntSliceVar(&s.capacities, "capacity-blocks", s.capacities,
		fmt.Sprintf("blocks the pool holds, 1 to %d; several separated by commas", maxPolicyBlocks))
	return cmd
}

func (s *policySettings) run(out io.Writer) error {
	makers, err := s.streams()
	if err != nil {
		return err
	}
	return s.print(out, measurePolicies(makers, s.capacities))
}

func (s *policySettings) print(out io.Writer, rows []policyReport) error {
	switch {
	case !s.json:
		return printPolicy(out, rows)
	case len(rows) == 1:
		return json.NewEncoder(out).Encode(rows[0])
	}
	return json.NewEncoder(out).Encode(map[string][]policyReport{"rows": rows})
}

// streams checks the settings and reads the traces that they name. Generated streams are made when
// their turn comes.
func (s *policySettings) streams() ([]streamMaker, error) {
	for _, c := range s.capacities {
		if c < 1 || c > maxPolicyBlocks {
			return nil, fmt.Errorf("--capacity-blocks is %d, must be 1 to %d", c, maxPolicyBlocks)
		}
	}
	if s.trace == "" && s.workload == "" {
		return nil, errors.New("--trace or --workload must be given")
	}
	var makers []streamMaker
	if s.trace != "" {
		stream, err := evictsim.ReadTrace(s.trace)
		if err != nil {
			return nil, err
		}
		stream.HashSeed = s.seed
		makers = append(makers, func() *evictsim.Stream { return stream })
	}
	generated, err := s.generated()
	return append(makers, generated...), err
}

func (s *policySettings) generated() (makers []streamMaker, err error) {
	names := "all"
	for _, w := range evictsim.Workloads {
		names += ", " + w.Name
		if s.workload == w.Name || s.workload == "all" {
			makers = append(makers, func() *evictsim.Stream {
				stream := w.Make(s.seed)
				stream.HashSeed = s.seed
				return stream
			})
		}
	}
	if makers == nil && s.workload != "" {
		return nil, fmt.Errorf("--workload is %q, must be one of %s", s.workload, names)
	}
	return makers, nil
}

// streamMaker makes a stream when its turn comes: all of them at once take gigabytes.
type streamMaker func() *evictsim.Stream

// measurePolicies runs each stream at each capacity, as many streams at once as there are cores.
func measurePolicies(makers []streamMaker, capacities []int) []policyReport {
	rows := make([]policyReport, len(makers)*len(capacities))
	runs := runsAlone
	if len(makers) > 1 {
		runs = runsAmong
	}
	var next atomic.Int64
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(makers)) {
		workers.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(makers); i = int(next.Add(1)) - 1 {
				stream := makers[i]()
				for k, capacity := range capacities {
					rows[i*len(capacities)+k] = measurePolicy(stream, capacity, runs)
				}
			}
		})
	}
	workers.Wait()
	return rows
}

// How often each policy is timed; of each part of the stream the least counts.
const (
	runsAlone = 25
	runsAmong = 3 // several streams: their caches are shared anyway
)

func measurePolicy(s *evictsim.Stream, capacity, runs int) policyReport {
	r := policyReport{
		Stream: s.Name, Capacity: capacity, Policies: map[string]float64{},
		LRU: evictsim.LRU(s, capacity).HitRate(), Opt: evictsim.Optimum(s, capacity).HitRate(),
	}
	for _, name := range evict.Names {
		result := simulate(s, name, capacity, runs)
		r.Policies[name] = result.HitRate()
		switch name {
		case evict.DefaultName:
			r.HitRate, r.PerAccess = result.HitRate(), result.PerAccess().Nanoseconds()
		case evict.LRUName:
			r.PerAccessLRU = result.PerAccess().Nanoseconds()
		}
	}
	r.BelowLRU = r.LRU - r.HitRate
	return r
}

// simulate simulates a policy. Of the time of each part of the stream the least of the runs counts.
func simulate(s *evictsim.Stream, eviction string, capacity, runs int) evictsim.Result {
	least := evictsim.Run(s, evict.Named(eviction), capacity)
	for range runs - 1 {
		least = least.Least(evictsim.Run(s, evict.Named(eviction), capacity))
	}
	return least
}

func printPolicy(w io.Writer, rows []policyReport) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "stream\tblocks\t")
	for _, name := range evict.Names {
		fmt.Fprintf(t, "%s\t", name)
	}
	fmt.Fprintln(t, "exact LRU\toptimum\tbelow LRU by\tns/access\tLRU ns\t")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%d\t", filepath.Base(r.Stream), r.Capacity)
		for _, name := range evict.Names {
			fmt.Fprintf(t, "%.4f\t", r.Policies[name])
		}
		fmt.Fprintf(t, "%.4f\t%.4f\t%+.4f\t%d\t%d\t\n", r.LRU, r.Opt, r.BelowLRU, r.PerAccess, r.PerAccessLRU)
	}
	return t.Flush()
}

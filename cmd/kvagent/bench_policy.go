package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/pool/evict/evictsim"
)

// policyReport is block hits along the prefix over all blocks of a stream, at one capacity.
type policyReport struct {
	Stream   string             `json:"stream"`
	Capacity int                `json:"capacity_blocks"`
	HitRate  float64            `json:"hit_rate"` // the default policy, through the pool's own interface
	LRU      float64            `json:"lru"`      // exact LRU
	Opt      float64            `json:"opt"`      // Belady's optimum
	Policies map[string]float64 `json:"policies"` // each through the pool's own interface
	// Time in the policy alone per block looked up, the least of some runs, and the same for LRU.
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

func benchPolicyCommand() *cobra.Command {
	s := policySettings{capacities: []int{defaultPolicyBlock}, seed: defaultPolicySeed}
	cmd := &cobra.Command{
		Use:   "policy --trace FILE | --workload NAME",
		Short: "Hit rate of the pool's eviction on a trace, beside LRU and the optimum",
		Long: "Replays a trace (one JSON object a line, with timestamp and hash_ids), or a generated workload, against a pool of " +
			"--capacity-blocks blocks whose data is address space only. Each request hits the leading blocks that are stored, and then " +
			"has all its blocks stored. Time is the trace's.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return s.run(cmd.OutOrStdout()) },
	}
	f := cmd.Flags()
	f.BoolVar(&s.json, "json", false, "print one JSON object; of several capacities or workloads, its rows")
	f.StringVar(&s.trace, "trace", "", "trace file in Mooncake's format")
	f.StringVar(&s.workload, "workload", "", "generated workload, or all")
	f.Uint64Var(&s.seed, "seed", s.seed, "seed of generated workloads")
	f.IntSliceVar(&s.capacities, "capacity-blocks", s.capacities, fmt.Sprintf("blocks the pool holds, 1 to %d; several separated by commas", maxPolicyBlocks))
	return cmd
}

func (s *policySettings) run(out io.Writer) error {
	streams, err := s.streams()
	if err != nil {
		return err
	}
	var rows []policyReport
	for _, stream := range streams {
		for _, capacity := range s.capacities {
			row, err := benchPolicy(stream, capacity)
			if err != nil {
				return err
			}
			rows = append(rows, row)
		}
	}
	switch {
	case !s.json:
		return printPolicy(out, rows)
	case len(rows) == 1:
		return json.NewEncoder(out).Encode(rows[0])
	}
	return json.NewEncoder(out).Encode(map[string][]policyReport{"rows": rows})
}

// streams checks the settings and reads or makes what they name.
func (s *policySettings) streams() ([]*evictsim.Stream, error) {
	for _, c := range s.capacities {
		if c < 1 || c > maxPolicyBlocks {
			return nil, fmt.Errorf("--capacity-blocks is %d, must be 1 to %d", c, maxPolicyBlocks)
		}
	}
	if (s.trace == "") == (s.workload == "") {
		return nil, errors.New("either --trace or --workload must be given")
	}
	if s.trace != "" {
		stream, err := evictsim.ReadTrace(s.trace)
		return []*evictsim.Stream{stream}, err
	}
	var streams []*evictsim.Stream
	names := "all"
	for _, w := range evictsim.Workloads {
		names += ", " + w.Name
		if s.workload == w.Name || s.workload == "all" {
			streams = append(streams, w.Make(s.seed))
		}
	}
	if streams == nil {
		return nil, fmt.Errorf("--workload is %q, must be one of %s", s.workload, names)
	}
	return streams, nil
}

func printPolicy(w io.Writer, rows []policyReport) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "stream\tblocks\t")
	for _, name := range evictions {
		fmt.Fprintf(t, "%s\t", name)
	}
	fmt.Fprintln(t, "exact LRU\toptimum\tns/access\tLRU ns\t")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%d\t", r.Stream, r.Capacity)
		for _, name := range evictions {
			fmt.Fprintf(t, "%.4f\t", r.Policies[name])
		}
		fmt.Fprintf(t, "%.4f\t%.4f\t%d\t%d\t\n", r.LRU, r.Opt, r.PerAccess, r.PerAccessLRU)
	}
	return t.Flush()
}

package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/settings"
)

// paceReport has the steps of a compute loop alone, beside saves without a limit, and beside saves
// that are paced. Ratios are medians over the rounds; Low and High are their quartiles.
type paceReport struct {
	Threads      int   `json:"threads"`
	WeightsBytes int64 `json:"weights_bytes"` // that a step reads
	Steps        int   `json:"steps"`         // of one phase
	Rounds       int   `json:"rounds"`
	CPUTime      bool  `json:"cpu_time"` // of the slowest thread, in place of the time that passed

	AloneP50US float64   `json:"alone_p50_us"`
	AloneP99US float64   `json:"alone_p99_us"`
	Noise      paceRatio `json:"noise_p99_ratio"` // of two phases alone of one round
	FreeP50    paceRatio `json:"free_p50_ratio"`  // beside saves without a limit, in alone
	FreeP99    paceRatio `json:"free_p99_ratio"`
	PacedP50   paceRatio `json:"paced_p50_ratio"` // beside paced saves, in alone
	PacedP99   paceRatio `json:"paced_p99_ratio"`
	FreeGBps   float64   `json:"free_gbps"` // 10^9 bytes of saves per second
	PacedGBps  float64   `json:"paced_gbps"`
	Share      paceRatio `json:"paced_rate_share"` // of the rate without a limit

	Cuts   uint64 `json:"cuts"`
	Raises uint64 `json:"raises"`
	Holds  uint64 `json:"holds"`
}

// paceRatio is the median of the ratios of the rounds, with their quartiles.
type paceRatio struct {
	Low    float64 `json:"low"`
	Median float64 `json:"median"`
	High   float64 `json:"high"`
}

func ratioOf(a, b []float64) (r paceRatio) {
	r.Low, r.Median, r.High = quartiles(a, b)
	r.Low, r.Median, r.High = rounded(r.Low), rounded(r.Median), rounded(r.High)
	return r
}

// Ranges of the settings of bench pace.
const (
	minPaceWeights, maxPaceWeights = 1 << 20, 1 << 36
	minPaceMemory, maxPaceMemory   = 64 << 20, 1 << 38
	minPaceSteps, maxPaceSteps     = 20, 1 << 20
	maxPaceRounds                  = 1000
)

type paceSettings struct {
	json, cpuTime          bool
	threads, steps, rounds int
	weights, memory        int64
	settle                 int // steps before the first round, for the pacer to learn
}

func paceCommand() *cobra.Command {
	s := paceSettings{threads: 1, steps: 200, rounds: 9, weights: 64 << 20, memory: 512 << 20, settle: 600}
	cmd := &cobra.Command{
		Use:   "pace",
		Short: "Measure decode steps beside saves, with pace and without",
		Long: `Runs a loop that reads weights from memory, as a decode step does, and measures its steps alone,
beside saves without an end, and beside such saves with --pace auto, in turns. The steps are reported to the
pacer as an engine's are. Before the first round the pacer has --settle steps to find its rate.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := measurePace(&s)
			if err != nil {
				return err
			}
			return printPace(cmd.OutOrStdout(), r, s.json)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&s.json, "json", false, "print one JSON object")
	f.BoolVar(&s.cpuTime, "cpu-time", false,
		"a step's time is the processor time of its slowest thread, for machines whose processors others use too")
	f.Var(settings.Count(&s.threads, 1, max(runtime.NumCPU(), 1)), "threads", "threads of the loop")
	f.Var(settings.Count(&s.steps, minPaceSteps, maxPaceSteps), "steps", "steps of one phase")
	f.Var(settings.Count(&s.rounds, 1, maxPaceRounds), "rounds", "rounds, of which the median counts")
	f.Var(settings.Count(&s.settle, 0, maxPaceSteps), "settle", "steps beside paced saves before the first round")
	f.Var(settings.Size(&s.weights, minPaceWeights, maxPaceWeights), "weights", "bytes that a step reads")
	f.Var(settings.Size(&s.memory, minPaceMemory, maxPaceMemory), "memory", "engine memory, and pool")
	return cmd
}

func printPace(out io.Writer, r *paceReport, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(out).Encode(r)
	}
	show := func(p paceRatio) string { return fmt.Sprintf("%.2f (%.2f to %.2f)", p.Median, p.Low, p.High) }
	_, err := fmt.Fprintf(out, `a step alone: p50 %.0f us, p99 %.0f us; p99 of two such phases: x %s
beside saves without a limit, %.2f GB/s: p50 x %s, p99 x %s
beside paced saves, %.2f GB/s: p50 x %s, p99 x %s
paced saves have %s of the rate; %d cuts, %d raises, %d holds
`, r.AloneP50US, r.AloneP99US, show(r.Noise), r.FreeGBps, show(r.FreeP50), show(r.FreeP99), r.PacedGBps,
		show(r.PacedP50), show(r.PacedP99), show(r.Share), r.Cuts, r.Raises, r.Holds)
	return err
}

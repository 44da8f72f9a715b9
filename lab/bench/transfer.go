package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/settings"
)

// transferRow is one line of the result: the path from engine memory to the pool or back compared
// with plain copy().
type transferRow struct {
	Direction    string  `json:"direction"` // save, load, both; sum: one core sums what a load reads
	SegmentBytes int     `json:"segment_bytes"`
	GBps         float64 `json:"gbps"`      // 10^9 bytes per second, median
	CopyGBps     float64 `json:"copy_gbps"` // the same bytes by copy(), with as many threads
	Ratio        float64 `json:"ratio"`     // median of the ratios of neighbouring measurements
}

type transferSettings struct {
	json   bool
	rounds int
	memory int64 // bytes of engine memory, and of the pool
}

func transferCommand() *cobra.Command {
	s := transferSettings{}
	cmd := &cobra.Command{
		Use:   "transfer",
		Short: "Compare saves and loads on the host device with plain copy()",
		Long: `Moves scattered blocks between an engine's memory and a pool, with checksums, and, alternating with
that, the same bytes between the same places by copy() with as many threads. Takes about 10 seconds
and three times --memory bytes of memory.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if s.rounds < 1 || s.rounds > 1000 {
				return settings.Invalid(fmt.Errorf("--rounds is %d, must be 1 to 1000", s.rounds))
			}
			if s.memory < 64<<20 || s.memory > 1<<40 {
				return settings.Invalid(fmt.Errorf("--memory is %d bytes, must be %d to %d", s.memory, 64<<20,
					int64(1)<<40))
			}
			rows, err := measureTransfer(&s)
			if err != nil {
				return err
			}
			return printTransfer(cmd.OutOrStdout(), rows, s.json)
		},
	}
	cmd.Flags().BoolVar(&s.json, "json", false, "print one JSON object")
	cmd.Flags().IntVar(&s.rounds, "rounds", 9, "measurements of each kind, of which the median counts")
	cmd.Flags().Int64Var(&s.memory, "memory", 1<<30, "bytes of engine memory, and of the pool")
	return cmd
}

func measureTransfer(s *transferSettings) (rows []transferRow, err error) {
	b, err := newTransferBench(s.memory)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	for _, segment := range []int{4 << 10, 32 << 10, 256 << 10} {
		more, err := b.measure(segment, s.rounds)
		if err != nil {
			return nil, fmt.Errorf("segments of %d bytes: %w", segment, err)
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

func printTransfer(out io.Writer, rows []transferRow, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(out).Encode(map[string]any{"rows": rows})
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(w, "segment\tdirection\tGB/s\tcopy() GB/s\tratio\t")
	for _, r := range rows {
		_, _ = fmt.Fprintf(w, "%d KiB\t%s\t%.2f\t%.2f\t%.2f\t\n", r.SegmentBytes>>10, r.Direction, r.GBps, r.CopyGBps,
			r.Ratio)
	}
	return w.Flush()
}

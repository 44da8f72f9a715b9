package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/ipc"
)

// lookupRow is one line of the result: round trips of one form.
type lookupRow struct {
	Form   string  `json:"form"`
	Hashes int     `json:"hashes"`
	Ranks  int     `json:"ranks"`
	P50us  float64 `json:"p50_us"`
	P99us  float64 `json:"p99_us"`
}

type lookupSettings struct {
	blocks int      // stored
	rounds int      // questions of each kind
	form   ipc.Form // of all questions; 0: of every form
	agent  string   // lookupVirtual or another one
}

const wideRanks = 8

var (
	lookupForms = []ipc.Form{ipc.FormOwn, ipc.FormUpstream, ipc.FormAscend2, ipc.FormAscend3, ipc.FormAscend4,
		ipc.FormSimple}
	lookupHashes = []int{1, 128, 2048}
)

func lookupCommand() *cobra.Command {
	asJSON, s := false, lookupSettings{blocks: 1 << 20, rounds: 1000, agent: lookupVirtual}
	cmd := &cobra.Command{
		Use:   "lookup",
		Short: "Time look-ups of all forms",
		Long: `Runs an agent, in a process of its own, whose pool holds 1,048,576 blocks (their data is address
space only), and asks it for random runs of them: all are hits. The own form reserves what it finds
and releases it outside of the measurement. Takes about 20 seconds.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			rows, err := measureLookup(&s)
			if err != nil {
				return err
			}
			return printLookup(cmd.OutOrStdout(), rows, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.AddCommand(lookupAgentCommand())
	return cmd
}

func measureLookup(s *lookupSettings) (rows []lookupRow, err error) {
	for _, ranks := range []int{1, wideRanks} {
		more, err := measureLookupRanks(s, ranks)
		if err != nil {
			return nil, fmt.Errorf("%d ranks: %w", ranks, err)
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// measureLookupRanks measures all forms for an engine of one rank, and the own form for several
// ranks.
func measureLookupRanks(s *lookupSettings, ranks int) (rows []lookupRow, err error) {
	b, err := newLookupBench(s, ranks)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	for _, form := range lookupForms {
		if s.form != 0 && s.form != form || ranks > 1 && form != ipc.FormOwn {
			continue
		}
		for _, n := range lookupHashes {
			row, err := b.measure(form, n, s.rounds)
			if err != nil {
				return nil, fmt.Errorf("form %v, %d hashes: %w", form, n, err)
			}
			rows = append(rows, row)
		}
	}
	return rows, nil
}

func printLookup(out io.Writer, rows []lookupRow, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(out).Encode(map[string]any{"rows": rows})
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(w, "form\tranks\thashes\tp50 us\tp99 us\t")
	for _, r := range rows {
		_, _ = fmt.Fprintf(w, "%s\t%d\t%d\t%.0f\t%.0f\t\n", r.Form, r.Ranks, r.Hashes, r.P50us, r.P99us)
	}
	return w.Flush()
}

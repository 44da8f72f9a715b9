// Package replay runs a recorded trace through agents and mock engines, and reports the outcome.
package replay

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/settings"
)

// Command returns the command replay.
func Command() *cobra.Command {
	s := newScenario()
	remove := func() {}
	cmd := &cobra.Command{
		Use:   "replay --trace FILE [--scenario FILE]",
		Short: "Replay a recorded trace through mock engines, with every byte checked",
		Long: `Replay starts an agent (the kvagent in this program's folder, or that of --kvagent) and mock engines
in processes of their own. It sends them the requests of a trace in Mooncake's format, in virtual
time: arrivals keep their order, and the trace runs as fast as the machine allows. Every block that
is loaded from the pool is compared byte for byte, and every block of a request again when it ends.

Turns of one conversation go to different engines, so that one engine hits what another one saved.
In a scenario engines, the agents of all nodes, their movers and helpers and the server of a shared
tier can be killed and paused at random moments, engines and agents preferably while a copy is in
flight; then requests are computed again and none may fail. Faults rotate over the nodes, from one
that the seed chooses.

A replay whose engines report nothing for long fails and names what it waits for. SIGTERM and SIGINT
end it, and everything that it started, within 20 s.

It fails (exit code 1) if a byte was wrong, a request failed, a lease or a mapping is left at the
end, or the scenario expected something else.

A scenario is a YAML file, a setting a line; testdata/scenarios has some. It may have the flags
requests, engines, pace, seed and device, which the command line overrides, and, where the tiers and
the server may name $KVBENCH_DIR, an empty directory, $KVBENCH_PORT and $KVBENCH_PORT2, free ports
of loopback, $KVBENCH_KEY, a key for servers of the run, and other variables of the environment:
` + fileHelp(),
		Example: `  kvbench replay --trace conversation.jsonl --progress
  kvbench replay --trace conversation.jsonl --json --scenario testdata/scenarios/short/kills.yaml --seed 1`,
		Args: cobra.NoArgs,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if remove, err = setVariables(); err != nil {
				return err
			}
			if err := s.read(cmd.Flags()); err != nil {
				remove()
				return settings.Invalid(err)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			defer remove()
			defer endInTime(ctx, cmd.ErrOrStderr())()
			return run(ctx, s, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Flags().SortFlags = false
	s.addFlags(cmd.Flags())
	return cmd
}

// run is the whole run; the error is its verdict.
func run(ctx context.Context, s *scenario, out, log io.Writer) error {
	if s.seed == 0 {
		s.seed = uint64(time.Now().UnixNano())
	}
	records, err := mockengine.ReadTrace(s.trace, s.requests)
	if err != nil {
		return settings.Invalid(err)
	}
	if len(records) == 0 {
		return settings.Invalid(fmt.Errorf("%s: no requests", s.trace))
	}
	r, err := newReplay(s, records)
	if err != nil {
		return settings.Invalid(err)
	}
	r.show = newProgress(s, out, log)
	err = r.run(ctx)
	report := r.report()
	r.show.end(r, &report)
	if err != nil {
		return err
	}
	return report.verdict(s)
}

// Times in which a replay ends what it started.
const (
	EndsWithin    = 20 * time.Second // after SIGTERM or SIGINT everything has ended; the times below add up to less
	brokenWithin  = 8 * time.Second  // for agents to end by themselves when the run is aborted
	enginesWithin = 10 * time.Second // for processes of engines that have left to end
)

// endInTime ends this process if it has not ended EndsWithin after ctx is done; the kernel kills
// its children with it. The caller calls disarm when everything has ended.
func endInTime(ctx context.Context, log io.Writer) (disarm func()) {
	over := make(chan struct{})
	go func() {
		select {
		case <-over:
			return
		case <-ctx.Done():
		}
		timer := time.NewTimer(EndsWithin)
		defer timer.Stop()
		select {
		case <-over:
		case <-timer.C:
			fmt.Fprintf(log, "replay: not over %v after its end was requested: killed\n", EndsWithin)
			os.Exit(1)
		}
	}()
	return func() { close(over) }
}

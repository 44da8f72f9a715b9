package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/proof"
	"github.com/kvagent/kvagent/settings"
)

// proofSettings are all settings of proof.
type proofSettings struct {
	json, quick, strict bool
	only                string
}

func proofCommand() *cobra.Command {
	s := &proofSettings{}
	cmd := &cobra.Command{
		Use:   "proof",
		Short: "Check on one GPU what the CUDA path promises, with figures",
		Long: `Proof needs only a driver and one GPU that this process sees
(CUDA_VISIBLE_DEVICES): no engine, no agent, no configuration. It starts its own engines and agents as processes,
exports and imports GPU memory in both forms, compares every byte, kills the processes, and measures copies, pinning
and memory. It prints one line for each check.

It fails (exit code 1) if a check fails. A missed target is reported, and is a failure only with --strict.
--quick uses small sizes, for a software driver, where figures mean nothing.`,
		Example: `  kvagent proof
  CUDA_VISIBLE_DEVICES=0 kvagent proof --json > docs/measurements/2026-11-20-h100.json
  kvagent proof --check transfer`,
		Args: settings.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if is, err := proof.Child(); is {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return s.run(ctx, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.BoolVar(&s.json, "json", false, "print one JSON object")
	f.BoolVar(&s.quick, "quick", false, "use small sizes; figures mean nothing")
	f.BoolVar(&s.strict, "strict", false, "fail if a target is missed")
	f.Var(settings.Choice(&s.only, proof.Names()), "check", "one check only")
	return cmd
}

func (s *proofSettings) run(ctx context.Context, out io.Writer) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	o := proof.Options{Command: []string{self, "proof"}, Quick: s.quick, Only: s.only}
	o.Each = func(l *proof.Line) { showLine(out, l) }
	if s.json { // the object is printed at the end
		o.Each = func(l *proof.Line) { showLine(os.Stderr, l) }
	}
	r, err := proof.Run(ctx, o)
	if err != nil {
		if errors.Is(err, cudaipc.ErrNoCUDA) {
			return fmt.Errorf("no GPU to run on: %w", err)
		}
		return err
	}
	r.Version, _ = build()
	if s.json {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		err = e.Encode(r)
	} else {
		fmt.Fprintf(out, "%s, %s, %d of %d MiB free, driver for CUDA %d.%d, %s\n", r.GPU, r.UUID, r.FreeMiB, r.TotalMiB,
			r.Driver/1000, r.Driver%1000/10, r.Host)
	}
	var failed []string
	for _, l := range r.Lines {
		if !l.OK {
			failed = append(failed, l.Name)
		}
	}
	switch {
	case len(failed) > 0:
		err = errors.Join(err, fmt.Errorf("failed: %s", strings.Join(failed, ", ")))
	case s.strict && !r.TargetsMet:
		err = errors.Join(err, errors.New("targets are missed"))
	}
	return err
}

// showLine prints a check's result.
func showLine(out io.Writer, l *proof.Line) {
	state := "ok  "
	if !l.OK {
		state = "FAIL"
	}
	fmt.Fprintf(out, "%s %-15s %5.1f s  %s\n", state, l.Name, l.Seconds, l.Text)
	if l.Error != "" {
		fmt.Fprintf(out, "     %s\n", l.Error)
	}
	for _, t := range l.Targets {
		word, met := "at least", "met"
		if t.Most {
			word = "at most"
		}
		if !t.Met {
			met = "NOT met"
		}
		fmt.Fprintf(out, "     target %s: %.3g, %s %.3g: %s\n", t.Name, t.Got, word, t.Want, met)
	}
}

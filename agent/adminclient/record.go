package adminclient

import (
	"context"
	"encoding/json"
	"fmt"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/settings"
)

const recordHelp = `Record prints what engines ask of the agent as a trace, until it is interrupted, --for is over, or
the agent ends: a line for each prompt, with its time and a number for each of its blocks. kvbench size, kvbench replay
and kvbench bench policy take it. There are no tokens and no hashes in it: the numbers are made with a secret that the
agent forgets, so only equal blocks of one recording can be told.

A full disk ends the recording, not the agent. A prompt that the agent cannot pass on in time is dropped, and counted.
What an engine finds in its own memory from beginning to end it does not ask for, so it is not in the trace.`

const maxRecordTime = 30 * 24 * time.Hour

func recordCommand() *cobra.Command {
	var within time.Duration // 0: until interrupted
	cmd := plainAskCommand(&cobra.Command{
		Use: "record", Short: "Print what engines ask as a trace", Long: recordHelp,
		Example: `  kvagent record --for 24h > monday.jsonl
  kvbench size --trace monday.jsonl --block-bytes 2MiB`,
	}, func(a *ask, _ []string) error { return record(a, within) })
	cmd.Flags().Var(settings.Duration(&within, 0, maxRecordTime), "for", "how long to record; 0: until interrupted")
	return cmd
}

func record(a *ask, within time.Duration) error {
	ctx, stop := signal.NotifyContext(a.Context(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if within > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, within)
		defer cancel()
	}
	var requests, dropped uint64
	err := a.Lines(ctx, "/record", func(text []byte) error {
		var line admin.RecordLine
		if err := json.Unmarshal(text, &line); err != nil {
			return fmt.Errorf("a line of the agent: %w", err)
		}
		if dropped += line.Dropped; len(line.HashIDs) == 0 {
			return nil
		}
		requests++
		_, err := a.OutOrStdout().Write(append(text[:len(text):len(text)], '\n'))
		return err
	})
	if ctx.Err() != nil { // the operator has ended it
		err = nil
	} else if err != nil {
		err = fmt.Errorf("record: after %d requests: %w", requests, err)
	}
	fmt.Fprintf(a.ErrOrStderr(), "%d requests, and %d that were dropped\n", requests, dropped)
	return err
}

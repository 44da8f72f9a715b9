// Package lab is the program that tests kvagent without real engines: it plays engines, replays
// traces through them, and measures parts. The agent's own program links none of it.
package lab

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/lab/bench"
	"github.com/kvagent/kvagent/lab/hold"
	"github.com/kvagent/kvagent/lab/mock"
	"github.com/kvagent/kvagent/lab/replay"
	"github.com/kvagent/kvagent/lab/size"
	"github.com/kvagent/kvagent/settings"
)

// Exit codes: the command failed; a setting or an argument is not allowed.
const exitFailed, exitConfig = 1, 2

// Main runs the command that the arguments name, and returns the exit code. It writes an error to
// log.
func Main(args []string, log io.Writer) (code int) {
	root := command()
	root.SetArgs(args)
	err := root.Execute()
	if err == nil {
		return 0
	}
	fmt.Fprintln(log, "kvbench:", err)
	if errors.As(err, new(*settings.InvalidError)) {
		return exitConfig
	}
	return exitFailed
}

func command() *cobra.Command {
	root := &cobra.Command{
		Use:   "kvbench",
		Short: "Test kvagent: mock engines, recorded traces, and measurements",
		Example: `  kvbench replay --trace conversation.jsonl --progress
  kvbench mock --trace conversation.jsonl --requests 200 --socket-dir /tmp/kv
  kvbench bench lookup`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(settings.FlagError)
	root.AddCommand(mock.Command(), replay.Command(), bench.Command(), hold.Command(), size.Command())
	return root
}

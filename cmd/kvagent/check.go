package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/settings"
)

// checks are the arguments of check, with the paths of admin.sock that answer them.
var checks = map[string]string{"live": "/livez", "ready": "/readyz"}

func checkCommand() *cobra.Command {
	dir := socketDirSetting()
	cmd := &cobra.Command{
		Use:   "check live|ready",
		Short: "Check whether a running agent is alive, or ready",
		Long: `Check asks the agent of a socket directory through admin.sock, for probes that run a command.
It ends with 0, or prints the reason and ends with 1: no agent answers, or the agent says why it does not serve.`,
		Example: `  kvagent check ready
  kvagent check live --socket-dir /run/kvagent`,
		Args: settings.Args(cobra.MatchAll(cobra.ExactArgs(1), checkArgument)),
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			return settings.Invalid(settings.Fill(cmd.Flags(), os.LookupEnv))
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			_, err := adminclient.New(*dir).Get(cmd.Context(), checks[args[0]])
			if err != nil {
				return fmt.Errorf("not %s: %w", args[0], err)
			}
			return nil
		},
		ValidArgs: []string{"live", "ready"},
	}
	addSocketDir(cmd, dir)
	return cmd
}

func checkArgument(_ *cobra.Command, args []string) error {
	if _, known := checks[args[0]]; !known {
		return fmt.Errorf("%q, allowed: live, ready", args[0])
	}
	return nil
}

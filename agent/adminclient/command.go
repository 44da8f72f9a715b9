package adminclient

import (
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/settings"
)

// Commands returns the commands that ask a running agent.
func Commands() []*cobra.Command {
	return []*cobra.Command{statusCommand(), checkCommand(), setCommand(), cacheCommand(), explainCommand(),
		recordCommand(), hintCommand()}
}

// ask is a command that asks a running agent.
type ask struct {
	*cobra.Command
	*Client
	asJSON bool
}

// askCommand makes of a command one that asks the agent of a socket directory and prints its
// answer, also as JSON.
func askCommand(cmd *cobra.Command, run func(a *ask, args []string) error) *cobra.Command {
	asJSON := cmd.Flags().Bool("json", false, "print the agent's answer as JSON")
	return plainAskCommand(cmd, func(a *ask, args []string) error {
		a.asJSON = *asJSON
		return run(a, args)
	})
}

// plainAskCommand makes of a command one that asks the agent of a socket directory.
func plainAskCommand(cmd *cobra.Command, run func(a *ask, args []string) error) *cobra.Command {
	dir := settings.DefaultSocketDir()
	settings.AddSocketDir(cmd.Flags(), &dir, "directory of the agent's sockets")
	if cmd.Args == nil {
		cmd.Args = cobra.NoArgs
	}
	cmd.Args = settings.Args(cmd.Args)
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		return settings.Invalid(settings.Fill(cmd.Flags(), os.LookupEnv))
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return run(&ask{Command: cmd, Client: New(dir)}, args)
	}
	return cmd
}

// show prints an agent's answer as it is, or by print.
func show[T any](a *ask, body []byte, err error, print func(out io.Writer, answer *T) error) error {
	var answer T
	if err == nil && !a.asJSON {
		err = json.Unmarshal(body, &answer)
	}
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", a.Name(), err)
	case a.asJSON:
		_, err = a.OutOrStdout().Write(body)
		return err
	}
	return print(a.OutOrStdout(), &answer)
}

// checks are the arguments of check, with the paths of admin.sock that answer them.
var checks = map[string]string{"live": "/livez", "ready": "/readyz"}

func checkCommand() *cobra.Command {
	return plainAskCommand(&cobra.Command{
		Use:   "check live|ready",
		Short: "Check whether a running agent is alive, or ready",
		Long: `Check asks the agent of a socket directory through admin.sock, for probes that run a command.
It ends with 0, or prints the reason and ends with 1: no agent answers, or the agent says why it does not serve.`,
		Example: `  kvagent check ready
  kvagent check live --socket-dir /run/kvagent`,
		Args:      cobra.MatchAll(cobra.ExactArgs(1), validArgs),
		ValidArgs: []string{"live", "ready"},
	}, func(a *ask, args []string) error {
		if _, err := a.Get(a.Context(), checks[args[0]]); err != nil {
			return fmt.Errorf("not %s: %w", args[0], err)
		}
		return nil
	})
}

// validArgs refuses arguments that are none of the command's.
func validArgs(cmd *cobra.Command, args []string) error {
	for _, arg := range args {
		if !slices.Contains(cmd.ValidArgs, arg) {
			return fmt.Errorf("%s: unknown, allowed: %s", arg, strings.Join(cmd.ValidArgs, ", "))
		}
	}
	return nil
}

func setCommand() *cobra.Command {
	return plainAskCommand(&cobra.Command{
		Use:   "set loads=on|off saves=on|off",
		Short: "Switch loads or saves of a running agent",
		Long: `Set switches loads and saves off and on while the agent runs. With loads off, look-ups find nothing and
engines compute; with saves off, nothing new is stored. Engines are notified at once.`,
		Example: `  kvagent set loads=off
  kvagent set loads=on saves=on --socket-dir /run/kvagent`,
		Args:      cobra.MatchAll(cobra.MinimumNArgs(1), validArgs),
		ValidArgs: []string{"loads=on", "loads=off", "saves=on", "saves=off"},
	}, func(a *ask, args []string) error {
		query := url.Values{}
		for _, arg := range args {
			key, value, _ := strings.Cut(arg, "=")
			query.Set(key, value)
		}
		body, err := a.Post(a.Context(), "/set?"+query.Encode(), nil)
		return show(a, body, err, func(out io.Writer, now *report.SwitchState) error {
			_, err := fmt.Fprintf(out, "loads=%s saves=%s\n", onOff(now.Loads), onOff(now.Saves))
			return err
		})
	})
}

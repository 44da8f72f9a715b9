// Command kvagent is the node's KV cache agent and the tools around it.
package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/settings"
)

// Exit codes, besides 0.
const (
	exitFailed = 1 // the command failed
	exitConfig = 2 // a setting or an argument is not allowed
	exitHeld   = 3 // another agent serves the socket directory
	exitCut    = 4 // the agent ended, but jobs were cut off
)

// exitError is an error with its own exit code. Invalid settings have exitConfig.
type exitError struct {
	code int
	error
}

func (e exitError) Unwrap() error { return e.error }

// ask is a command that asks a running agent.
type ask struct {
	*cobra.Command
	*adminclient.Client
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
		return run(&ask{Command: cmd, Client: adminclient.New(dir)}, args)
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

func main() {
	err := rootCommand().Execute()
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "kvagent:", err)
	os.Exit(exitCode(err))
}

func exitCode(err error) int {
	var e exitError
	if errors.As(err, &e) {
		return e.code
	}
	if errors.As(err, new(*settings.InvalidError)) {
		return exitConfig
	}
	return exitFailed
}

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "kvagent",
		Short: "The KV cache agent of a GPU node",
		Long: `kvagent keeps the KV-cache blocks of the inference engines on this node in one pool of memory, moves them
between the engines and the pool, and tells the engines' schedulers how much of a prompt is there already.

  kvagent serve --socket-dir DIR --pool 64GiB    run the agent
  kvagent status --socket-dir DIR                what is connected, how full, how often it hits
  kvagent set loads=off --socket-dir DIR         switch loads or saves while it runs

proof shows on a GPU that the CUDA path works there, and how fast.
Another program, kvbench, tests the agent without a GPU: mock engines, a recorded trace, and measurements.`,
		Example: `  kvagent serve --socket-dir /tmp/kv --pool 1GiB &
  kvagent status --socket-dir /tmp/kv
  kvagent completion bash > /etc/bash_completion.d/kvagent`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(settings.FlagError)
	root.AddCommand(serveCommand(), statusCommand(), checkCommand(), setCommand(), cacheCommand(), explainCommand(),
		recordCommand(), hintCommand(), versionCommand(), proofCommand(), moverCommand())
	return root
}

// version and commit may be set by the linker; by default they are the module's and the checkout's.
var version, commit string

// build returns the version and the commit of this binary.
func build() (v, revision string) {
	v, revision = version, commit
	modified := ""
	if info, ok := debug.ReadBuildInfo(); ok {
		v = cmp.Or(v, info.Main.Version)
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision":
				revision = cmp.Or(revision, s.Value)
			case s.Key == "vcs.modified" && s.Value == "true":
				modified = ", with changes"
			}
		}
	}
	return v, cmp.Or(revision, "unknown") + modified
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show the version of this build",
		Args:  settings.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			v, revision := build()
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "kvagent %s (commit %s), %s %s/%s, session protocol %d to %d\n", v,
				revision, runtime.Version(), runtime.GOOS, runtime.GOARCH, ipc.MinVersion, ipc.Version)
			return err
		},
	}
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

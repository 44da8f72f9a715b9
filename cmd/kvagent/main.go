// Command kvagent is the node's KV cache agent and the tools around it.
package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/adminclient"
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
	root.AddCommand(serveCommand(), versionCommand(), proofCommand(), moverCommand())
	root.AddCommand(adminclient.Commands()...)
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
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "kvagent %s (commit %s), %s %s/%s, session protocol %d\n", v,
				revision, runtime.Version(), runtime.GOOS, runtime.GOARCH, ipc.Version)
			return err
		},
	}
}

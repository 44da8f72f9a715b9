// Command kvagent is the node's KV cache agent and the tools around it.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
)

func main() {
	if err := rootCommand().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "kvagent:", err)
		os.Exit(1)
	}
}

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "kvagent",
		Short:         "The KV cache agent of a GPU node",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(serveCommand(), statusCommand(), setCommand(), versionCommand(), mockCommand(), replayCommand(), benchCommand())
	return root
}

func benchCommand() *cobra.Command {
	bench := &cobra.Command{Use: "bench", Short: "Measure a part against its reference in the same run"}
	bench.AddCommand(benchLookupCommand(), benchIndexCommand(), benchTransferCommand(), benchPolicyCommand())
	return bench
}

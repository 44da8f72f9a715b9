// Package bench measures parts of kvagent, each against its reference in the same run.
package bench

import "github.com/spf13/cobra"

// Command is bench with all its measurements.
func Command() *cobra.Command {
	bench := &cobra.Command{Use: "bench", Short: "Measure a part against its reference in the same run"}
	bench.AddCommand(lookupCommand(), indexCommand(), transferCommand(), policyCommand(), recoverCommand(),
		diskCommand(), peerCommand())
	return bench
}

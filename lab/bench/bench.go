// Package bench measures parts of kvagent, each against its reference in the same run.
package bench

import "github.com/spf13/cobra"

// Command is bench with all its measurements.
func Command() *cobra.Command {
	bench := &cobra.Command{Use: "bench", Short: "Measure a part against its reference in the same run"}
	bench.AddCommand(benchLookupCommand(), benchIndexCommand(), benchTransferCommand(), benchPolicyCommand(), benchRecoverCommand(), benchDiskCommand(), benchSlabsCommand())
	return bench
}

package main

import "github.com/spf13/cobra"

// benchCommand is bench with all its measurements.
func benchCommand() *cobra.Command {
	bench := &cobra.Command{Use: "bench", Short: "Measure a part against its reference in the same run"}
	bench.AddCommand(benchLookupCommand(), benchIndexCommand(), benchTransferCommand(), benchPolicyCommand(), benchRecoverCommand(), benchDiskCommand(), benchSlabsCommand())
	return bench
}

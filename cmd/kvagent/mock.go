package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/mockengine"
)

func mockCommand() *cobra.Command {
	var drive bool
	cmd := &cobra.Command{
		Use: "mock",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if drive {
				return mockengine.Drive(os.Stdin, cmd.OutOrStdout())
			}
			return fmt.Errorf("under construction")
		},
	}
	cmd.Flags().BoolVar(&drive, "drive", false, "driven over standard input and output")
	return cmd
}

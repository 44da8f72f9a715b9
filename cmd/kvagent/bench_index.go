package main

import (
	"errors"

	"github.com/spf13/cobra"
)

func benchIndexCommand() *cobra.Command {
	return &cobra.Command{Use: "benchIndex", RunE: func(*cobra.Command, []string) error { return errors.New("under construction") }}
}

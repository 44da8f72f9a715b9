package main

import (
	"errors"

	"github.com/spf13/cobra"
)

func benchLookupCommand() *cobra.Command {
	return &cobra.Command{Use: "benchLookup", RunE: func(*cobra.Command, []string) error { return errors.New("under construction") }}
}

package main

import (
	"errors"

	"github.com/spf13/cobra"
)

func mockCommand() *cobra.Command {
	return &cobra.Command{Use: "mock", RunE: func(*cobra.Command, []string) error { return errors.New("under construction") }}
}

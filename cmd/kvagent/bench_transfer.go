package main

import (
	"errors"

	"github.com/spf13/cobra"
)

func benchTransferCommand() *cobra.Command {
	return &cobra.Command{Use: "benchTransfer", RunE: func(*cobra.Command, []string) error { return errors.New("under construction") }}
}

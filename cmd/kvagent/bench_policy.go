package main

import (
	"errors"

	"github.com/spf13/cobra"
)

func benchPolicyCommand() *cobra.Command {
	return &cobra.Command{Use: "benchPolicy", RunE: func(*cobra.Command, []string) error { return errors.New("under construction") }}
}

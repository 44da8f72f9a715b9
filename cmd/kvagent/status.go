package main

import (
	"errors"

	"github.com/spf13/cobra"
)

func statusCommand() *cobra.Command {
	return &cobra.Command{Use: "status", RunE: func(*cobra.Command, []string) error { return errors.New("under construction") }}
}

func setCommand() *cobra.Command {
	return &cobra.Command{Use: "set", RunE: func(*cobra.Command, []string) error { return errors.New("under construction") }}
}

func versionCommand() *cobra.Command {
	return &cobra.Command{Use: "version", RunE: func(*cobra.Command, []string) error { return errors.New("under construction") }}
}

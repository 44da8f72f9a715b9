package main

import (
	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/adminclient"
)

// socketDirSetting is the one setting that all commands share.
func socketDirSetting() *string {
	dir := adminclient.DefaultDir
	return &dir
}

func addSocketDir(cmd *cobra.Command, dir *string) {
	cmd.Flags().StringVar(dir, "socket-dir", *dir, "directory of the agent's sockets")
}

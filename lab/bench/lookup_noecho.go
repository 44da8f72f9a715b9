//go:build nozmq

package bench

import (
	"errors"

	"github.com/spf13/cobra"
)

// lookupEchoCommand would be libzmq's server, which is not in this program.
func lookupEchoCommand() *cobra.Command {
	return &cobra.Command{
		Use: "echo PATH", Hidden: true,
		RunE: func(*cobra.Command, []string) error {
			return errors.New("bench lookup compares with libzmq, and this program is built without it (build tag nozmq)")
		},
	}
}

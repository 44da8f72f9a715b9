//go:build !libzmq

package bench

import "github.com/spf13/cobra"

// withEcho is whether this build can compare look-ups with libzmq's.
const withEcho = false

func lookupEchoCommands() []*cobra.Command { return nil }

//go:build cuda

package mover

import "time"

// Measuring takes a software driver seconds with the race detector, and many where all processors
// are taken. This holds in the processes that a test starts, too: they are the same binary.
func init() { calibrateWithin, maxProbe = 50*time.Second, time.Minute }

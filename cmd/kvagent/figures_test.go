//go:build !race

package main

import "testing"

// figures begins a test of rates. The race detector makes it ten times slower and sees nothing in it that the storms do not show: `make test-go` runs
// these tests once more without it (scripts/figures).
func figures(t *testing.T) { t.Parallel() }

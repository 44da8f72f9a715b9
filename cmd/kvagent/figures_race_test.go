//go:build race

package main

import "testing"

func figures(t *testing.T) {
	t.Skip("a test of hits and rates: make test-figures runs it, without -race")
}

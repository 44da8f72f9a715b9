//go:build race

package main

import "testing"

func figures(t *testing.T) { t.Skip("a test of rates: to be run without -race") }

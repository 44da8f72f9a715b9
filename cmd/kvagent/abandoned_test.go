package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/pool/dram"
)

// A file of an agent that does not come back is named by the next one beside it, also if that one
// starts cold.
func TestAbandonedFileIsNamed(t *testing.T) {
	own := poolFile(t)
	left := filepath.Join(filepath.Dir(own), "left")
	for _, path := range []string{own, left} {
		p, err := dram.Open(dram.Options{Bytes: 1 << 20, Path: path})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	_, _, log := startServe(t, "--dram-path", own) // of another size: cold
	if said := log.String(); !strings.Contains(said, "no agent uses") || !strings.Contains(said, left) ||
		!strings.Contains(said, "starts empty") {
		t.Errorf("the log does not name %s: %s", left, said)
	}
}

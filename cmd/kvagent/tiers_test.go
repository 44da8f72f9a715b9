package main

import (
	"strings"
	"testing"

	"github.com/kvagent/kvagent/pool/tierspec"
)

func TestPrefillRateErrors(t *testing.T) {
	for _, bad := range []string{"-1", "1e10", "fast"} {
		if err := (&prefillRate{}).Set(bad); err == nil ||
			!strings.Contains(err.Error(), "allowed: 0 to 1000000000, or learn") {
			t.Errorf("prefill-tokens-per-second %s: %v", bad, err)
		}
	}
}

// Tokens are kept in a file only where blocks of which events tell outlive the agent.
func TestTokensFile(t *testing.T) {
	disk := &tierspec.Spec{Scheme: tierspec.SchemeDisk, Path: "/d"}
	shared := &tierspec.Spec{Scheme: "redis"}
	for _, c := range []struct {
		dram, state string
		tiers       []*tierspec.Spec
		want        string
	}{
		{"", "", nil, ""},
		{"", "/s", []*tierspec.Spec{shared}, ""},
		{"/m", "", nil, "/m.tokens"},
		{"/m", "/s", []*tierspec.Spec{shared}, "/m.tokens"},
		{"", "", []*tierspec.Spec{shared, disk}, "/d/kvagent.tokens"},
		{"/m", "/s", []*tierspec.Spec{disk}, "/s/kvagent.tokens"},
	} {
		s := &serveSettings{dramPath: c.dram}
		s.tiers.state, s.tiers.specs = c.state, c.tiers
		if got := s.tokensFile(); got != c.want {
			t.Errorf("%+v: %q, want %q", c, got, c.want)
		}
	}
}

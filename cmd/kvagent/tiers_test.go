package main

import (
	"os"
	"testing"

	"github.com/kvagent/kvagent/pool/tierspec"
	"github.com/kvagent/kvagent/settings"
)

// Agents keep their resets in directories of their own, also where none is named.
func TestStateDirectory(t *testing.T) {
	disk := &tierspec.Spec{Scheme: tierspec.SchemeDisk, Path: "/d"}
	shared := &tierspec.Spec{Scheme: "redis"}
	base := systemState
	if os.Geteuid() != 0 {
		t.Setenv("XDG_STATE_HOME", "/x")
		base = "/x/kvagent"
	}
	own := settings.DefaultSocketDir()
	for _, c := range []struct {
		state, sockets string
		tiers          []*tierspec.Spec
		want           string
	}{
		{"", own, nil, ""},
		{"/s", own, []*tierspec.Spec{disk}, "/s"},
		{"", own, []*tierspec.Spec{shared, disk}, "/d"},
		{"", own, []*tierspec.Spec{shared}, base},
		{"", "/tmp/a", []*tierspec.Spec{shared}, base + "/%2Ftmp%2Fa"},
		{"", "/tmp/b", []*tierspec.Spec{shared}, base + "/%2Ftmp%2Fb"},
	} {
		s := &serveSettings{socketDir: c.sockets}
		s.tiers.state, s.tiers.specs = c.state, c.tiers
		if got, err := s.stateDir(); err != nil || got != c.want {
			t.Errorf("%+v: %q, %v, want %q", c, got, err, c.want)
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
		{"", "/d", []*tierspec.Spec{shared, disk}, "/d/kvagent.tokens"},
		{"/m", "/s", []*tierspec.Spec{disk}, "/s/kvagent.tokens"},
	} {
		s := &serveSettings{dramPath: c.dram}
		s.tiers.state, s.tiers.specs = c.state, c.tiers
		if got := s.tokensFile(); got != c.want {
			t.Errorf("%+v: %q, want %q", c, got, c.want)
		}
	}
}

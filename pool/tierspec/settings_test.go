package tierspec

import (
	"os"
	"testing"

	"github.com/kvagent/kvagent/settings"
)

// Agents keep their resets in directories of their own, also where none is named.
func TestStateDirectory(t *testing.T) {
	disk := &Spec{Scheme: SchemeDisk, Path: "/d"}
	shared := &Spec{Scheme: "redis"}
	base := systemState
	if os.Geteuid() != 0 {
		t.Setenv("XDG_STATE_HOME", "/x")
		base = "/x/kvagent"
	}
	own := settings.DefaultSocketDir()
	for _, c := range []struct {
		state, sockets string
		tiers          []*Spec
		want           string
	}{
		{"", own, nil, ""},
		{"/s", own, []*Spec{disk}, "/s"},
		{"", own, []*Spec{shared, disk}, "/d"},
		{"", own, []*Spec{shared}, base},
		{"", "/tmp/a", []*Spec{shared}, base + "/%2Ftmp%2Fa"},
		{"", "/tmp/b", []*Spec{shared}, base + "/%2Ftmp%2Fb"},
	} {
		s := &Settings{state: c.state, specs: c.tiers}
		if got, err := s.stateDir(c.sockets); err != nil || got != c.want {
			t.Errorf("%+v: %q, %v, want %q", c, got, err, c.want)
		}
	}
}

// Tokens are kept in a file only where blocks of which events tell outlive the agent.
func TestTokensFile(t *testing.T) {
	disk := &Spec{Scheme: SchemeDisk, Path: "/d"}
	shared := &Spec{Scheme: "redis"}
	for _, c := range []struct {
		dram, state string
		tiers       []*Spec
		want        string
	}{
		{"", "", nil, ""},
		{"", "/s", []*Spec{shared}, ""},
		{"/m", "", nil, "/m.tokens"},
		{"/m", "/s", []*Spec{shared}, "/m.tokens"},
		{"", "/d", []*Spec{shared, disk}, "/d/kvagent.tokens"},
		{"/m", "/s", []*Spec{disk}, "/s/kvagent.tokens"},
	} {
		s := &Settings{state: c.state, specs: c.tiers}
		if got := s.TokensFile(c.dram); got != c.want {
			t.Errorf("%+v: %q, want %q", c, got, c.want)
		}
	}
}

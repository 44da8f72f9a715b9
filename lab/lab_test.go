package lab

import (
	"strings"
	"testing"
)

func TestFlagErrors(t *testing.T) {
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"replay", "--seed", "-1"}, []string{"--seed", `"-1"`, "allowed: a whole number from 0 on"}},
		{[]string{"replay", "--progress=2"}, []string{"--progress", `"2"`, "allowed: true, false"}},
		{[]string{"bench", "transfer", "--rounds", "1e9"}, []string{"--rounds", `"1e9"`, "allowed: 1 to 1000"}},
	} {
		var log strings.Builder
		if code := Main(c.args, &log); code != exitConfig {
			t.Errorf("%v: exit %d, want %d\n%s", c.args, code, exitConfig, log.String())
			continue
		}
		for _, part := range c.want {
			if !strings.Contains(log.String(), part) {
				t.Errorf("%v: %q does not say %q", c.args, log.String(), part)
			}
		}
	}
}

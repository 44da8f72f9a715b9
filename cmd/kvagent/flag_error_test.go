package main

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
		{[]string{"replay", "--abort-rate", "some"}, []string{"--abort-rate", `"some"`, "allowed: a number"}},
		{[]string{"replay", "--sync-scheduling=2"}, []string{"--sync-scheduling", `"2"`, "allowed: true, false"}},
		{[]string{"bench", "lookup", "--rounds", "1e9"}, []string{"--rounds", `"1e9"`, "allowed: a whole number"}},
		{[]string{"serve", "--queue", "0"}, []string{"--queue", `"0"`, "allowed: 1 to 65536"}},
	} {
		root := rootCommand()
		root.SetArgs(c.args)
		err := root.Execute()
		if err == nil || exitCode(err) != exitConfig {
			t.Errorf("%v: %v", c.args, err)
			continue
		}
		for _, part := range c.want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%v: %q does not say %q", c.args, err, part)
			}
		}
	}
}

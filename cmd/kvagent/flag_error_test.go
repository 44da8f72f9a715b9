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
		{[]string{"serve", "--keep-percent", "51"}, []string{"--keep-percent", `"51"`, "allowed: 0 to 50"}},
		{[]string{"serve", "--log-json=2"}, []string{"--log-json", `"2"`, "allowed: true, false"}},
		{[]string{"serve", "--queue", "1"}, []string{"unknown flag: --queue"}},
		{[]string{"serve", "--pace", "fast"}, []string{"--pace", `"fast"`, "allowed: auto, off, or 1MiB/s to 4TiB/s"}},
		{[]string{"serve", "--pace", "2GiB"}, []string{"--pace", `"2GiB"`, "allowed: auto, off, or 1MiB/s to 4TiB/s"}},
		{[]string{"serve", "--pace", "1KiB/s"}, []string{"--pace", `"1KiB/s"`, "1MiB/s to 4TiB/s"}},
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

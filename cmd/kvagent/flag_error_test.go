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
		{[]string{"serve", "--queue", "0"}, []string{"--queue", `"0"`, "allowed: 1 to 65536"}},
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

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

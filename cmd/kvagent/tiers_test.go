package main

import (
	"strings"
	"testing"
	"time"
)

func TestPrefillRateErrors(t *testing.T) {
	for _, bad := range []string{"-1", "1e10", "fast"} {
		if err := (&prefillRate{}).Set(bad); err == nil ||
			!strings.Contains(err.Error(), "allowed: 0 to 1000000000, or learn") {
			t.Errorf("prefill-tokens-per-second %s: %v", bad, err)
		}
	}
}

// How long a named generation must be unused is 0, or long beside the interval at which nodes say
// what they use.
func TestCollectUnusedIsChecked(t *testing.T) {
	for _, c := range []struct {
		unused, every time.Duration
		ok            bool
	}{
		{0, time.Hour, true}, {10 * time.Minute, 5 * time.Second, true}, {100 * time.Hour, time.Hour, true},
		{10*time.Minute - 1, 5 * time.Second, false}, {100*time.Hour - 1, time.Hour, false},
	} {
		err := (&tierSettings{collectUnused: c.unused, epochEvery: c.every}).check()
		if c.ok != (err == nil) || err != nil &&
			!strings.Contains(err.Error(), "tier-collect-unused: "+c.unused.String()+", allowed: 0, or ") {
			t.Errorf("%v every %v: %v", c.unused, c.every, err)
		}
	}
}

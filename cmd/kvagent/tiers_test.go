package main

import (
	"strings"
	"testing"
)

func TestPrefillRateErrors(t *testing.T) {
	for _, bad := range []string{"-1", "1e10", "fast"} {
		if err := (&prefillRate{}).Set(bad); err == nil || !strings.Contains(err.Error(), "allowed: 0 to 1000000000, or learn") {
			t.Errorf("prefill-tokens-per-second %s: %v", bad, err)
		}
	}
}

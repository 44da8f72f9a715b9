package main

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/settings"
)

// Every end has its exit code.
func TestExitCodes(t *testing.T) {
	plain := errors.New("plain")
	for _, c := range []struct {
		err  error
		want int
	}{
		{serveError(plain), exitFailed},
		{serveError(fmt.Errorf("x: %w", socketdir.ErrInUse)), exitHeld},
		{serveError(fmt.Errorf("2 jobs still run: %w", context.DeadlineExceeded)), exitCut},
		{serveError(fmt.Errorf("2 jobs still run: %w", context.Canceled)), exitCut},
		{settings.Invalid(plain), exitConfig},
		{fmt.Errorf("wrapped: %w", settings.Invalid(plain)), exitConfig},
	} {
		if got := exitCode(c.err); got != c.want {
			t.Errorf("%v: exit code %d, want %d", c.err, got, c.want)
		}
	}
	if serveError(nil) != nil || settings.Invalid(nil) != nil {
		t.Error("a good end is an error")
	}
}

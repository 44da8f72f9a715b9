package agent

import (
	"fmt"
	"io"
	"os"
	"testing"

	"github.com/kvagent/kvagent/ipc"
)

// The reason of a session's end is the same whichever goroutine sees it first.
func TestWhyASessionIsLost(t *testing.T) {
	for _, c := range []struct {
		greeted bool
		why     error
		want    string
		code    uint8
	}{
		{true, io.EOF, endPeer, 0},
		{true, ipc.ErrPeerDied, endPeer, 0},
		{true, fmt.Errorf("session send: %w", os.ErrDeadlineExceeded), endSlow, 0},
		{true, ipc.ErrStalled, endSlow, ipc.ErrCodeLimit},
		{false, io.EOF, endHandshake, 0},
		{false, ipc.ErrTimeout, endHandshake, 0},
	} {
		s := &session{ending: make(chan struct{})}
		s.greeted.Store(c.greeted)
		s.lost(c.why)
		s.lost(io.ErrUnexpectedEOF) // only the first reason counts
		if s.end.reason != c.want || s.end.code != c.code {
			t.Errorf("%v, greeted %v: %s with code %d, want %s with %d", c.why, c.greeted, s.end.reason, s.end.code,
				c.want, c.code)
		}
	}
}

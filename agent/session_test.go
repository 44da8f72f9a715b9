package agent

import (
	"fmt"
	"io"
	"net"
	"os"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
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

// A program that only looks whether an agent answers is nothing to warn of, one that breaks off is.
func TestASessionThatOnlyLookedIsNotWarnedOf(t *testing.T) {
	r := newRig(t)
	for i, c := range []struct {
		sent string
		want zapcore.Level
	}{{"", zap.InfoLevel}, {"\x00", zap.WarnLevel}} {
		conn, err := net.Dial("unix", r.path(socketdir.Session))
		check(t, err)
		_, err = conn.Write([]byte(c.sent))
		check(t, err)
		check(t, conn.Close())
		ended := func() []observer.LoggedEntry { return r.logs.FilterMessage("session ended").All() }
		r.waitFor("its end", func(admin.Status) bool { return len(ended()) == i+1 })
		if got := ended()[i].Level; got != c.want {
			t.Errorf("after %q: %v, want %v", c.sent, got, c.want)
		}
	}
	if n := r.agent.metrics.SessionEnds[endHandshake].Load(); n != 2 {
		t.Errorf("%d sessions ended in the handshake, want 2", n)
	}
}

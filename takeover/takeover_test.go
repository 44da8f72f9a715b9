package takeover

import (
	"os"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/pool/dram"
)

// A pool's file is abandoned only if its agent has ended: one of this host, or the one that had
// this agent's directory, whatever its host was called.
func TestWhoseFileIsAbandoned(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	take := New(time.Second, zap.NewNop())
	take.before = holder{77, 5}
	for name, c := range map[string]struct {
		by    dram.HeldError
		ended bool
	}{
		"ended here":            {dram.HeldError{Process: 78, Began: 5, Host: host, Exited: true}, true},
		"the one before":        {dram.HeldError{Process: 77, Began: 5, Host: "x" + host, Exited: true}, true},
		"another pod":           {dram.HeldError{Process: 78, Began: 5, Host: "x" + host, Exited: true}, false},
		"another pod, same pid": {dram.HeldError{Process: 77, Began: 6, Host: "x" + host, Exited: true}, false},
		"the one before runs":   {dram.HeldError{Process: 77, Began: 5, Host: host}, false},
		"not signed":            {dram.HeldError{}, false},
	} {
		if got := take.hasEnded(&c.by); got != c.ended {
			t.Errorf("%s: ended %v", name, got)
		}
	}
}

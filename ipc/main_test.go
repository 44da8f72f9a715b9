package ipc

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// The test binary is also the peer that is killed: see TestKilledPeer.
func TestMain(m *testing.M) {
	if path := os.Getenv(helperPathEnv); path != "" {
		helperMain(path)
		return
	}
	goleak.VerifyTestMain(m)
}

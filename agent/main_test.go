package agent

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// TestMain also is the process of the test engines that are killed: see death_test.go.
func TestMain(m *testing.M) {
	if phase := os.Getenv(victimPhase); phase != "" {
		victim(phase, os.Getenv(victimDir))
		return
	}
	goleak.VerifyTestMain(m)
}

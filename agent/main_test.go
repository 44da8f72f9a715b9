package agent

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// TestMain also is the process of the test engines that are killed (death_test.go), and of movers.
func TestMain(m *testing.M) {
	devicetest.Child()
	if phase := os.Getenv(victimPhase); phase != "" {
		victim(phase, os.Getenv(victimDir))
		return
	}
	goleak.VerifyTestMain(m)
}

//go:build cuda

package cuda_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

func TestMain(m *testing.M) {
	devicetest.Child()
	code := m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		_, _ = os.Stderr.WriteString("leaked goroutines: " + err.Error() + "\n")
		code = 1
	}
	os.Exit(code)
}

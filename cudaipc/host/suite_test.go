package host_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/cudaipc"
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

// TestHostDevice runs the suite on all that a host device can be.
func TestHostDevice(t *testing.T) {
	for _, variant := range []struct {
		name string
		kind cudaipc.Kind
	}{
		{"Mapped", cudaipc.KindFD},
		{"Peer", cudaipc.KindPeer},
	} {
		t.Run(variant.name, func(t *testing.T) {
			devicetest.TestDevice(t, func(t *testing.T) devicetest.Fixture {
				return devicetest.Host(t, devicetest.MinArena, variant.kind)
			})
		})
	}
}

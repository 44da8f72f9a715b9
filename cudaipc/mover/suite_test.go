package mover_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
	"github.com/kvagent/kvagent/cudaipc/node"
)

func TestMain(m *testing.M) {
	playAgent()
	devicetest.Mover(openFaulty)
	devicetest.Child()
	code := m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		_, _ = os.Stderr.WriteString("leaked goroutines: " + err.Error() + "\n")
		code = 1
	}
	os.Exit(code)
}

// TestMoverDevice runs the suite on a host device in a mover, whose events are read here, or asked
// there as a GPU's are.
func TestMoverDevice(t *testing.T) {
	for _, variant := range []struct {
		name string
		kind cudaipc.Kind
		ask  bool
		node bool
	}{
		{"Mapped", cudaipc.KindFD, false, false},
		{"MappedAsked", cudaipc.KindFD, true, false},
		{"PeerAskedInNode", cudaipc.KindPeer, true, true},
	} {
		t.Run(variant.name, func(t *testing.T) {
			devicetest.TestDevice(t, func(t *testing.T) devicetest.Fixture {
				f := devicetest.MoverFixture(t, devicetest.MinArena, variant.kind,
					func(o *mover.Options) {
						o.AskEvents = variant.ask
					})
				if variant.node {
					f.Device = node.Open(node.Options{Host: f.Device})
				}
				return f
			})
		})
	}
}

//go:build cuda

package mover_test

import (
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
)

// TestMoverCUDADevice runs the suite on the CUDA device in a mover: as an agent has it.
func TestMoverCUDADevice(t *testing.T) {
	for name, kind := range map[string]cudaipc.Kind{"Handles": cudaipc.KindCUDA, "Pieces": cudaipc.KindCUDAFD} {
		t.Run(name, func(t *testing.T) {
			devicetest.TestDevice(t, func(t *testing.T) devicetest.Fixture {
				f := devicetest.MoverFixture(t, devicetest.MinArena, cudaipc.KindFD, func(o *mover.Options) {
					o.Device, o.Limits = cudaipc.CUDADevice, longLimits
				})
				f.Engine = func(t devicetest.T, s devicetest.Spec) devicetest.Engine {
					return devicetest.CUDAEngine(t, s, kind)
				}
				return f
			})
		})
	}
}

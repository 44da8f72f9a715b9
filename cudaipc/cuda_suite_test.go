//go:build cuda

package cudaipc_test

import (
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// TestCUDADevice runs the suite on all that a CUDA device can be.
func TestCUDADevice(t *testing.T) {
	for _, variant := range []struct {
		name   string
		kind   cudaipc.Kind
		change func(*cudaipc.CUDAOptions)
	}{
		{"Handles", cudaipc.KindCUDA, nil},
		{"Pieces", cudaipc.KindCUDAFD, nil},
		{"Ring", cudaipc.KindCUDA, func(o *cudaipc.CUDAOptions) { o.NoPin, o.Ring = true, 1<<20 }},
		{"SmallPins", cudaipc.KindCUDA, func(o *cudaipc.CUDAOptions) { o.PinPiece, o.Ring, o.InFlight = 1<<16, 1<<17, 1<<18 }},
	} {
		t.Run(variant.name, func(t *testing.T) {
			devicetest.TestDevice(t, func(t *testing.T) devicetest.Fixture {
				return devicetest.CUDA(t, devicetest.MinArena, variant.kind, variant.change)
			})
		})
	}
}

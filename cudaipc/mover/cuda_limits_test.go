//go:build cuda

package mover_test

import (
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// TestCUDALimitsAreTold expects Info to have the driver's limits after the lowering.
func TestCUDALimitsAreTold(t *testing.T) {
	ownMachine(t)
	for env, want := range map[string]cudaipc.CUDALimits{
		"SOFTCUDA_FAIL=":                    {Stack: 256},
		"SOFTCUDA_FAIL=cuCtxSetLimit:0:215": {Stack: 1024, Printing: 1 << 20, Heap: 8 << 20},
		"SOFTCUDA_FAIL=cuCtxGetLimit:0:215": {Stack: -1, Printing: -1, Heap: -1},
	} {
		m := newCUDAFixture(t, faultEngine(t), longLimits, env)
		m.attach(1)
		devicetest.Until(t, "the device says its limits", func() bool { return m.info().Limits == want })
	}
}

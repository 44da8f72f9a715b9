//go:build cuda

package mover_test

import (
	"math"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
)

// onlyKernel is a copy table that names the kernel for all runs.
var onlyKernel = []cudaipc.CopyRule{{UpTo: math.MaxUint64, Flat: cudaipc.CopyKernel, Rows: cudaipc.CopyKernel}}

// TestCUDAKernelThatDoesNotLoad expects the copies to be made without the kernel, and Info to
// report why it did not load.
func TestCUDAKernelThatDoesNotLoad(t *testing.T) {
	ownMachine(t)
	engine := faultEngine(t)
	for _, fault := range []string{"cuModuleLoadData:1:218", "cuModuleGetFunction:1:500"} {
		m := newCUDAFixture(t, engine, longLimits, onlyKernel, "SOFTCUDA_FAIL="+fault)
		m.attach(1)
		m.pinned()
		if d := m.done(m.submit(1, 1)[0]); d.Err != nil {
			t.Errorf("%s: copy: %v", fault, d.Err)
		}
		call, _, _ := strings.Cut(fault, ":")
		if info := m.info(); info.Kernels != 0 || !strings.Contains(info.KernelError, call) {
			t.Errorf("%s: %d launches, and Info says %q", fault, info.Kernels, info.KernelError)
		}
	}
}

// TestCUDAKernelIsOffByDefault expects no module to be loaded unless the table names the kernel.
func TestCUDAKernelIsOffByDefault(t *testing.T) {
	ownMachine(t)
	m := newCUDAFixture(t, faultEngine(t), longLimits, nil, "SOFTCUDA_FAIL=cuModuleLoadData:0:999")
	m.attach(1)
	if d := m.done(m.submit(1, 1)[0]); d.Err != nil {
		t.Fatalf("a copy where nothing can be loaded: %v", d.Err)
	}
}

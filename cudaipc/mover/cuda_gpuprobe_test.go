//go:build cuda

package mover_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
)

// contextBytes is what a context takes of the GPU in these tests.
const contextBytes = 3 << 20

// measuredWithin is how long a test waits for a GPU to be measured.
const measuredWithin = 5 * time.Minute

// measuredMover starts a mover that measures, and gives what its device said first.
func measuredMover(t *testing.T, change func(*mover.Options), env ...string) (*mover.Mover, <-chan cudaipc.CUDAInfo) {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvagent-test-") // a machine of this test alone
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	said := make(chan cudaipc.CUDAInfo, 64)
	f := devicetest.MoverFixture(t, devicetest.MinArena, cudaipc.KindFD, false, func(o *mover.Options) {
		o.Device, o.Measure, o.Limits = cudaipc.CUDADevice, true, mover.Limits{Start: measuredWithin}
		o.Env = append(append([]string{
			"SOFTCUDA_DIR=" + dir, fmt.Sprintf("SOFTCUDA_CONTEXT_BYTES=%d", contextBytes),
		}, env...), o.Env...)
		o.Informed = func(i cudaipc.CUDAInfo) {
			select {
			case said <- i:
			default: // the test has what it wants
			}
		}
		if change != nil {
			change(o)
		}
	})
	m := f.Device.(*mover.Mover)
	if err := m.Start(); err != nil {
		t.Fatal(err)
	}
	return m, said
}

// next returns what a device says of itself now.
func next(t *testing.T, said <-chan cudaipc.CUDAInfo) cudaipc.CUDAInfo {
	t.Helper()
	select {
	case i := <-said:
		return i
	case <-time.After(measuredWithin):
		t.Fatal("the device says nothing of itself")
		return cudaipc.CUDAInfo{}
	}
}

// TestCUDAProbe expects the first process to measure the paths and the size of the context, and the
// next to have them from the first.
func TestCUDAProbe(t *testing.T) {
	m, said := measuredMover(t, nil)
	first := next(t, said)
	if first.Source != cudaipc.TableMeasured || first.Facts.Table == nil || first.Facts.Problem != "" ||
		first.Facts.Context != contextBytes {
		t.Fatalf("%s, facts %+v, want a table and %d bytes", first.Source, first.Facts, contextBytes)
	}
	if err := first.Facts.Table.Check(); err != nil || first.Facts.Table.GPU != first.Name ||
		first.Facts.Table.Driver != first.Driver || first.Facts.Table.Version != cudaipc.CopyTableVersion {
		t.Errorf("table %+v of %s, driver %d: %v", first.Facts.Table, first.Name, first.Driver, err)
	}
	if err := unix.Kill(m.Movers()[0].Pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	devicetest.Until(t, "the killed process is seen", func() bool { return m.Movers()[0].Pid == 0 })
	if err := m.Start(); err != nil {
		t.Fatal(err)
	}
	again := next(t, said)
	for again.PinSeconds == first.PinSeconds { // still a report of the first
		again = next(t, said)
	}
	if again.Source != cudaipc.TableMeasured || again.Facts.Context != contextBytes || again.Paths != first.Paths {
		t.Errorf("the next process: %s, %s, facts %+v", again.Source, again.Paths, again.Facts)
	}
}

// TestCUDAProbeKnows expects a table of this GPU, driver and version to be used as it is, and
// others not.
func TestCUDAProbeKnows(t *testing.T) {
	known := cudaipc.DefaultCopyTable()
	known.GPU = "Software CUDA device 0"
	known.Rules = slices.Insert(known.Rules, 0, cudaipc.CopyRule{
		UpTo: 12345,
		Flat: cudaipc.CopySingle,
		Rows: cudaipc.CopySingle,
	})
	for name, test := range map[string]struct {
		driver, version int
		want            cudaipc.TableSource
	}{
		"by hand":        {0, 0, cudaipc.TableConfigured},
		"of this driver": {12080, cudaipc.CopyTableVersion, cudaipc.TableConfigured},
		"older driver":   {12040, cudaipc.CopyTableVersion, cudaipc.TableMeasured},
		"older version":  {12080, cudaipc.CopyTableVersion + 1, cudaipc.TableMeasured},
	} {
		t.Run(name, func(t *testing.T) {
			table := known
			table.Driver, table.Version = test.driver, test.version
			_, said := measuredMover(t, func(o *mover.Options) { o.Tables = []cudaipc.CopyTable{table} },
				"SOFTCUDA_DRIVER_VERSION=12080")
			i := next(t, said)
			if i.Source != test.want || strings.Contains(i.Paths, "12345") != (test.want == cudaipc.TableConfigured) ||
				i.Facts.Context != contextBytes {
				t.Errorf("%s, %s, facts %+v, want %s", i.Source, i.Paths, i.Facts, test.want)
			}
		})
	}
}

// TestCUDAProbeFails expects a GPU on which nothing can be measured to be opened all the same, with
// the reason reported.
func TestCUDAProbeFails(t *testing.T) {
	for fault, want := range map[string]string{
		"cuMemHostAlloc:3:2": "not measured: calibrate: cuMemHostAlloc", // the first two are the rings'
		"cuMemAlloc:1:2":     "not measured: calibrate: cuMemAlloc",
	} {
		t.Run(fault, func(t *testing.T) {
			_, said := measuredMover(t, nil, "SOFTCUDA_FAIL="+fault)
			if i := next(t, said); i.Source != cudaipc.TableDefault || !strings.Contains(i.Facts.Problem, want) {
				t.Errorf("%s, facts %+v, want the default and %q", i.Source, i.Facts, want)
			}
		})
	}
}

// TestCUDAProbeTakesTheRest expects a GPU with room for one context to be opened once the probe has
// released its own, and the probe's measurements to count.
func TestCUDAProbeTakesTheRest(t *testing.T) {
	_, said := measuredMover(t, nil, "SOFTCUDA_MEMORY=167772160", "SOFTCUDA_CONTEXT_BYTES=104857600")
	if i := next(t, said); i.Source != cudaipc.TableMeasured || i.Facts.Context != 0 ||
		!strings.Contains(i.Facts.Problem, "opened only without") {
		t.Errorf("%s, facts %+v, want the measured table and why the context was not", i.Source, i.Facts)
	}
}

// TestCUDALimitsAreTold expects Info to have the driver's limits after the lowering.
func TestCUDALimitsAreTold(t *testing.T) {
	for env, want := range map[string]cudaipc.CUDALimits{
		"SOFTCUDA_FAIL=":                    {Stack: 256},
		"SOFTCUDA_FAIL=cuCtxSetLimit:0:215": {Stack: 1024, Printing: 1 << 20, Heap: 8 << 20},
		"SOFTCUDA_FAIL=cuCtxGetLimit:0:215": {Stack: -1, Printing: -1, Heap: -1},
	} {
		_, said := measuredMover(t, nil, env)
		if got := next(t, said).Limits; got != want {
			t.Errorf("%s: %+v, want %+v", env, got, want)
		}
	}
}

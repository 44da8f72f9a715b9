//go:build cuda

package cuda_test

import (
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// TestCUDADevice runs the suite on all that a CUDA device can be.
func TestCUDADevice(t *testing.T) {
	for _, variant := range []struct {
		name   string
		kind   cudaipc.Kind
		change func(*cuda.Options)
	}{
		{"Handles", cudaipc.KindCUDA, nil},
		{"Pieces", cudaipc.KindCUDAFD, nil},
		{"Ring", cudaipc.KindCUDA, func(o *cuda.Options) { o.NoPin, o.Ring = true, 1<<20 }},
		{"Single", cudaipc.KindCUDA, func(o *cuda.Options) { o.Path = cuda.CopySingle }},
		{"SmallPins", cudaipc.KindCUDA, func(o *cuda.Options) { o.PinPiece, o.Ring = 1<<16, 1<<17 }},
	} {
		t.Run(variant.name, func(t *testing.T) {
			devicetest.TestDevice(t, func(t *testing.T) devicetest.Fixture {
				return devicetest.CUDA(t, devicetest.MinArena, variant.kind, variant.change)
			})
		})
	}
}

// TestCUDADeviceOfStrangers runs the suite on a device that does not know the processes of its
// peers, and so asks events of dead processes, too. One death before the suite shows how this
// driver ends them.
func TestCUDADeviceOfStrangers(t *testing.T) {
	fires := firesOnDeath(t)
	t.Logf("the events of the dead fire: %v", fires)
	devicetest.TestDevice(t, func(t *testing.T) devicetest.Fixture {
		f := devicetest.CUDA(t, devicetest.MinArena, cudaipc.KindCUDA, nil).WithoutPid()
		f.FireOnDeath = fires
		return f
	})
}

func firesOnDeath(t *testing.T) bool {
	b := newBench(t, devicetest.Spec{Regions: []int64{4096}, Events: 1}, nil)
	if err := b.peer.Close(); err != nil {
		t.Fatal(err)
	}
	im := b.describe()
	im.Pid = 0
	b.peer = devicetest.Import(t, b.device, im)
	b.do(devicetest.Op{Kind: devicetest.Hold}, devicetest.Op{Kind: devicetest.Record})
	b.engine.Kill()
	// The kernel has ended the process. An event that another process records from now on fires
	// after everything that the driver does about it.
	after := newBench(t, devicetest.Spec{Regions: []int64{4096}, Events: 1}, nil)
	after.do(devicetest.Op{Kind: devicetest.Record})
	devicetest.Until(t, "the event of a living process fires", func() bool { return after.poll(cudaipc.Wait{}).Fired })
	return b.poll(cudaipc.Wait{}).Fired
}

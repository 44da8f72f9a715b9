//go:build cuda

package transfer

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
	"github.com/kvagent/kvagent/pool"
)

// Of the test of the copy engine: blocks of a job, and of a batch.
const (
	busyBlocks = 64
	busyBatch  = 2
)

// TestCUDACopyEngineIsBusy expects the copy engine to have its next batch queued at each end of a
// copy in the middle of a job, with checksums, for saves and loads. The software driver's engine
// has a virtual clock, which stands still until it has: at 50 GiB/s a batch of 16 MiB takes 312 us,
// in which a worker and a mover have to begin the next. Batches are small here, and sums as fast as
// this machine makes them: the test is about the order of copies and sums, and the depth of the
// queue, and not about speed.
func TestCUDACopyEngineIsBusy(t *testing.T) {
	const name = "SOFTCUDA_COPY_AHEAD"
	knob := fmt.Sprintf("%d:%d", busyBatch*blockSize, busyBlocks*blockSize)
	t.Run("here", func(t *testing.T) {
		staysBusy(t, func(fd int, size int64) (cudaipc.Device, error) {
			t.Setenv(name, knob) // of this process alone: the engine's own copies are not queued
			d, err := openCUDA(fd, size)
			if err == nil {
				devicetest.Pinned(t, d) // else copies go through the ring
			}
			t.Setenv(name, "")
			return d, err
		}, func() {})
	})
	t.Run("in a mover", func(t *testing.T) {
		pinned := make(chan struct{})
		once := sync.OnceFunc(func() { close(pinned) })
		staysBusy(t, func(fd int, size int64) (cudaipc.Device, error) {
			return mover.New(mover.Options{
				Name: "test", Device: cudaipc.CUDADevice, ArenaFD: fd, ArenaSize: size, Node: -1,
				Command: devicetest.MoverCommand, Env: append([]string{name + "=" + knob}, devicetest.MoverEnv...),
				Informed: func(i cudaipc.CUDAInfo) {
					if i.PinDone {
						once()
					}
				},
			})
		}, func() {
			select {
			case <-pinned:
			case <-time.After(patience):
				t.Fatal("the mover does not pin its arena")
			}
		})
	})
}

func staysBusy(t *testing.T, device func(fd int, size int64) (cudaipc.Device, error), pinned func()) {
	t.Helper()
	open := openSampled{device: device, engine: func(t devicetest.T, s devicetest.Spec) devicetest.Engine {
		return devicetest.CUDAEngine(t, s, cudaipc.KindCUDA)
	}}
	r := open.rig(t, func(c *Config, _ *sampleRig) {
		c.Limits.BatchBytes = busyBatch * blockSize
		c.Lanes = NewLanes(16, c.Limits.SaveAge, nil) // as on a node of 16 processors
		c.Sampling = Sampling{}                       // samples are copies too
	})
	pinned()
	for _, job := range []Job{save(1, section(0, busyBlocks, 0)), load(2, section(0, busyBlocks, busyBlocks))} {
		for i, got := range r.finish(job).Status {
			if got != pool.OK {
				t.Fatalf("job %d, block %d: status %d; the driver says why", job.ID, i, got)
			}
		}
	}
}

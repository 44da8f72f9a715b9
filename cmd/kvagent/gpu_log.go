package main

import (
	"fmt"
	"sync"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/settings"
)

// gpuLog logs changes of GPUs.
type gpuLog struct {
	log *zap.Logger
	mu  struct {
		sync.Mutex
		last map[cudaipc.UUID]cudaipc.CUDAInfo
	}
}

func newGPULog(log *zap.Logger) *gpuLog {
	g := &gpuLog{log: log}
	g.mu.last = map[cudaipc.UUID]cudaipc.CUDAInfo{}
	return g
}

// informed receives the reports of a mover's device (mover.Options.Informed).
func (g *gpuLog) informed(i cudaipc.CUDAInfo) {
	g.mu.Lock()
	was, known := g.mu.last[i.GPU]
	g.mu.last[i.GPU] = i
	g.mu.Unlock()
	if !known {
		g.log.Info("a GPU is open", zap.Stringer("gpu", i.GPU), zap.String("type", i.Name), zap.Int("driver", i.Driver),
			zap.Bool("batch_call", i.Batch), zap.String("kernel_limits",
				fmt.Sprintf("stack %d, printing %d, heap %d bytes", i.Limits.Stack, i.Limits.Printing, i.Limits.Heap)))
	}
	g.pinning(&was, &i)
}

// pinning logs the result of pinning the pool, and parts that the driver refused.
func (g *gpuLog) pinning(was, i *cudaipc.CUDAInfo) {
	gpu, pinned := zap.Stringer("gpu", i.GPU), zap.String("pinned", settings.HumanSize(i.Pinned))
	switch {
	case i.PinError != "" && (was.PinError == "" || i.PinDone && !was.PinDone):
		g.log.Warn("the driver does not pin all of the pool: copies of the rest go through a small ring and are slower",
			gpu, pinned, zap.String("refused", settings.HumanSize(i.Refused)), zap.String("why", i.PinError),
			zap.String("hint", "memory that may be locked without limit (ulimit -l unlimited, --ulimit memlock=-1, "+
				"LimitMEMLOCK=infinity), or a smaller pool"))
	case i.PinDone && !was.PinDone && i.PinError == "":
		g.log.Info("the pool is pinned", gpu, pinned, zap.Float64("seconds", i.PinSeconds))
	}
}

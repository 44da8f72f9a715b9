package main

import (
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/settings"
)

// gpuLog logs changes of GPUs, and writes measured tables to the file.
type gpuLog struct {
	log    *zap.Logger
	tables *copyTables
	mu     struct {
		sync.Mutex
		last map[cudaipc.UUID]cudaipc.CUDAInfo
	}
}

func newGPULog(tables *copyTables, log *zap.Logger) *gpuLog {
	g := &gpuLog{log: log, tables: tables}
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
		g.opened(&i)
	}
	g.pinning(&was, &i)
}

// opened logs, once for each GPU, its copy paths and their cost.
func (g *gpuLog) opened(i *cudaipc.CUDAInfo) {
	from := map[cudaipc.TableSource]string{cudaipc.TableConfigured: "measured before",
		cudaipc.TableDefault: "default, not measured", cudaipc.TableMeasured: "measured now"}[i.Source]
	fields := []zap.Field{zap.Stringer("gpu", i.GPU), zap.String("type", i.Name), zap.Int("driver", i.Driver),
		zap.String("paths", i.Paths), zap.String("from", from)}
	fields = append(fields, zap.String("kernel_limits",
		fmt.Sprintf("stack %d, printing %d, heap %d bytes", i.Limits.Stack, i.Limits.Printing, i.Limits.Heap)))
	if g.tables != nil {
		fields = append(fields, zap.String("file", g.tables.path))
	}
	if i.Facts.Context > 0 {
		fields = append(fields, zap.String("own_memory", settings.HumanSize(i.Facts.Context)))
	}
	if i.Facts.Problem != "" {
		fields = append(fields, zap.String("problem", i.Facts.Problem))
	}
	if i.Source != cudaipc.TableMeasured || g.tables == nil {
		g.log.Info("copy paths", fields...)
		return
	}
	g.tables.add(i.Facts.Table)
	go g.keep(i.Facts.Table, fields) // not waited for: a hanging disk must not delay a mover's end
}

// keepWithin is how long the log line about a measurement waits for the file.
const keepWithin = 5 * time.Second

// keep writes a measured table to the file, and then logs it.
func (g *gpuLog) keep(t *cudaipc.CopyTable, fields []zap.Field) {
	kept := make(chan error, 1)
	go func() { kept <- g.tables.keep(t) }()
	select {
	case err := <-kept:
		if err != nil {
			fields = append(fields, zap.NamedError("not_kept", err))
		}
		g.log.Info("copy paths", fields...)
	case <-time.After(keepWithin):
		g.log.Info("copy paths",
			append(fields, zap.String("not_kept", fmt.Sprintf("the file is not written after %v", keepWithin)))...)
		if err := <-kept; err != nil {
			g.log.Warn("the measured copy paths are not kept", zap.String("file", g.tables.path), zap.Error(err))
		}
	}
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

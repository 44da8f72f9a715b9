package main

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/host"
	"github.com/kvagent/kvagent/cudaipc/mover"
	"github.com/kvagent/kvagent/cudaipc/node"
	"github.com/kvagent/kvagent/settings"
)

// moverKill replaces the kill of this agent's movers. Nil: SIGKILL. Tests set it.
var moverKill func(*os.Process) error

// moverCommand makes the command of a mover, which only serve starts.
func moverCommand() *cobra.Command {
	return &cobra.Command{
		Use: "mover", Hidden: true, Args: settings.Args(cobra.NoArgs),
		Short: "Copy between engines and the pool, for the agent that started this process",
		RunE:  func(*cobra.Command, []string) error { return mover.Run(mover.Open) },
	}
}

// openDevice opens the devices of this node over the pool's arena; the caller keeps its descriptor.
func openDevice(s *serveSettings, arena []byte, arenaFD int, log *zap.Logger) (*node.Node, error) {
	kind := s.device
	base := mover.Options{
		Name: "host", Device: cudaipc.HostDevice, ArenaFD: arenaFD, ArenaSize: int64(len(arena)), Node: -1,
		Kill: moverKill,
	}
	if kind == settings.DeviceCUDA {
		if err := probeCUDA(base); err != nil {
			return nil, fmt.Errorf("device: %q, allowed where a GPU can be opened: %w", kind, err)
		}
	}
	o := node.Options{NoGPU: "the agent was started with --device host"}
	if kind != settings.DeviceHost {
		o.GPU = moverOfGPU(base, log)
		log.Info("GPUs that the kernel lists; each is opened in a process of its own when an engine registers memory",
			zap.Int("gpus", node.CountGPUs()))
	}
	var err error
	o.Host, err = openHost(kind, arena, base)
	if err != nil {
		return nil, err
	}
	return node.Open(o), nil
}

// moverOfGPU returns a function that makes a GPU's mover.
func moverOfGPU(base mover.Options, log *zap.Logger) func(cudaipc.UUID) (cudaipc.Device, error) {
	base.Limits = gpuLimits
	return func(gpu cudaipc.UUID) (cudaipc.Device, error) {
		log.Info("a GPU is used for the first time", zap.Stringer("gpu", gpu))
		o := base.ForGPU(gpu)
		o.Informed = informGPU(log)
		return mover.New(o)
	}
}

// informGPU returns a function that logs changes of a GPU: that it is open, the result of pinning
// the pool, and parts that the driver refused. A process that ends and the next one may call it at
// once.
func informGPU(log *zap.Logger) func(cudaipc.CUDAInfo) {
	var mu sync.Mutex
	var was cudaipc.CUDAInfo
	return func(i cudaipc.CUDAInfo) {
		mu.Lock()
		defer mu.Unlock()
		gpu, pinned := zap.Stringer("gpu", i.GPU), zap.String("pinned", settings.HumanSize(i.Pinned))
		if was == (cudaipc.CUDAInfo{}) {
			log.Info("a GPU is open", gpu, zap.String("type", i.Name), zap.Int("driver", i.Driver),
				zap.Bool("batch_call", i.Batch))
		}
		switch {
		case i.PinError != "" && (was.PinError == "" || i.PinDone && !was.PinDone):
			log.Warn("the driver does not pin all of the pool: copies of the rest go through a small ring and are "+
				"slower", gpu, pinned, zap.String("refused", settings.HumanSize(i.Refused)),
				zap.String("why", i.PinError),
				zap.String("hint", "memory that may be locked without limit (ulimit -l unlimited, "+
					"--ulimit memlock=-1, LimitMEMLOCK=infinity), or a smaller pool"))
		case i.PinDone && !was.PinDone && i.PinError == "":
			log.Info("the pool is pinned", gpu, pinned, zap.Float64("seconds", i.PinSeconds))
		}
		was = i
	}
}

func openHost(kind string, arena []byte, base mover.Options) (cudaipc.Device, error) {
	if kind != settings.DeviceHostMover {
		return host.Open(arena), nil
	}
	m, err := mover.New(base)
	if err != nil {
		return nil, err
	}
	if err := m.Start(); err != nil { // now, so that a start that cannot work is reported
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// probeCUDA asks the driver for GPUs in a separate process, because the agent never calls the
// driver.
func probeCUDA(o mover.Options) error {
	o.Name, o.Device, o.Limits = "probe", cudaipc.CUDAProbe, mover.Limits{Start: gpuLimits.Start}
	m, err := mover.New(o)
	if err != nil {
		return err
	}
	return errors.Join(m.Start(), m.Close())
}

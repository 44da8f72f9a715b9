package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// Values of --device. In all but the first, GPUs are opened in movers, one process for each, when an engine first
// registers memory of one.
const (
	deviceHost      = "host"       // shared memory and engines on CPUs only
	deviceAuto      = "auto"       // host in this process
	deviceHostMover = "host-mover" // host in a mover too
	deviceCUDA      = "cuda"       // as auto, but a start without CUDA is an error
)

var devices = []string{deviceAuto, deviceHost, deviceHostMover, deviceCUDA}

// moverCommand is the process that serve starts and nobody else.
func moverCommand() *cobra.Command {
	return &cobra.Command{
		Use: "mover", Hidden: true, Args: checkArgs(cobra.NoArgs),
		Short: "Copy between engines and the pool, for the agent that started this process",
		RunE:  func(*cobra.Command, []string) error { return cudaipc.RunMover(cudaipc.OpenMoved) },
	}
}

// openDevice opens the devices of this node over the pool's arena, whose descriptor stays the caller's.
func openDevice(kind string, arenaFD int, size int64, log *zap.Logger) (*cudaipc.Node, error) {
	base := cudaipc.MoverOptions{Name: "host", Device: cudaipc.HostDevice, ArenaFD: arenaFD, ArenaSize: size, Populate: true, Node: -1}
	if kind == deviceCUDA {
		if err := probeCUDA(); err != nil {
			return nil, fmt.Errorf("device: %q, allowed where a GPU can be opened: %w", kind, err)
		}
	}
	o := cudaipc.NodeOptions{NoGPU: "the agent was started with --device host"}
	if kind != deviceHost {
		o.GPU = func(gpu cudaipc.UUID) (cudaipc.Device, error) {
			log.Info("a GPU is used for the first time", zap.Stringer("gpu", gpu))
			return cudaipc.NewMover(base.ForGPU(gpu))
		}
		log.Info("GPUs", zap.Int("seen", cudaipc.CountGPUs()), zap.String("opened", "each in a process of its own, when an engine registers its memory"))
	}
	var err error
	o.Host, err = openHost(kind, base)
	if err != nil {
		return nil, err
	}
	return cudaipc.OpenNode(o), nil
}

func openHost(kind string, base cudaipc.MoverOptions) (cudaipc.Device, error) {
	if kind != deviceHostMover {
		return cudaipc.OpenHost(cudaipc.HostOptions{ArenaFD: base.ArenaFD, ArenaSize: base.ArenaSize, Populate: true})
	}
	m, err := cudaipc.NewMover(base)
	if err != nil {
		return nil, err
	}
	if err := m.Start(); err != nil { // now, for a start that cannot work is to be seen
		return nil, errors.Join(err, m.Close(cudaipc.AllPeers))
	}
	return m, nil
}

// probeCUDA asks the driver for GPUs, in a process of its own: the agent never calls it.
func probeCUDA() error {
	fd, err := unix.MemfdCreate("kvagent-probe", unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	size := int64(os.Getpagesize())
	if err := unix.Ftruncate(fd, size); err != nil {
		return err
	}
	m, err := cudaipc.NewMover(cudaipc.MoverOptions{Name: "probe", Device: cudaipc.CUDAProbe, ArenaFD: fd, ArenaSize: size, Node: -1})
	if err != nil {
		return err
	}
	return errors.Join(m.Start(), m.Close(cudaipc.AllPeers))
}

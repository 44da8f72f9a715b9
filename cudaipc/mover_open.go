package cudaipc

import "fmt"

// Names of the devices that a mover opens (MoverSetup.Device).
const (
	HostDevice = "host"
	CUDADevice = "cuda"
	CUDAProbe  = "cuda-probe" // the host's, if a GPU can be seen; else why not
)

// OpenMoved opens, in a mover, the devices of this package by their names.
func OpenMoved(s MoverSetup) (Device, error) {
	switch s.Device {
	case CUDAProbe:
		if err := seeGPUs(); err != nil {
			return nil, err
		}
		fallthrough
	case HostDevice:
		return OpenHost(HostOptions{ArenaFD: s.ArenaFD, ArenaSize: s.ArenaSize, FireOnDeath: s.FireOnDeath, Populate: s.Populate})
	case CUDADevice:
		return openMovedCUDA(s)
	}
	return nil, fmt.Errorf("device %q, allowed: %s, %s: %w", s.Device, HostDevice, CUDADevice, ErrKind)
}

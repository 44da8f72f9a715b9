package cudaipc

import (
	"encoding/json"
	"fmt"
)

// OpenMoved opens, in a mover, the devices of this package by their names.
func OpenMoved(s MoverSetup) (Device, error) {
	switch s.Device {
	case CUDAProbe:
		if err := SeeGPUs(); err != nil {
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

// openMovedCUDA opens the GPU of a setup over the pool's arena, which the device pins in the background.
func openMovedCUDA(s MoverSetup) (Device, error) {
	open := openGPU
	if s.Measure && HasCUDA {
		open = openWitnessed
	}
	d, err := open(&s)
	if err != nil {
		return nil, err
	}
	return d, nil
}

func openGPU(s *MoverSetup) (*CUDA, error) {
	return OpenCUDA(CUDAOptions{GPU: s.GPU, ArenaFD: s.ArenaFD, ArenaSize: s.ArenaSize, Tables: s.Tables, Facts: s.Facts})
}

// deviceInfo is what a device has to say of itself, JSON; nothing, if it has nothing to say.
func deviceInfo(d Device) []byte {
	c, ok := d.(interface{ Info() CUDAInfo })
	if !ok {
		return nil
	}
	text, err := json.Marshal(c.Info())
	if err != nil {
		return nil // it has texts and numbers only
	}
	return text
}

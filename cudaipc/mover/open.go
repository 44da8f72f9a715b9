package mover

import (
	"encoding/json"
	"fmt"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/cudaipc/host"
)

// Open opens, in a mover, the devices of this package by their names.
func Open(s Setup) (cudaipc.Device, error) {
	switch s.Device {
	case cudaipc.CUDAProbe:
		if err := cuda.SeeGPUs(); err != nil {
			return nil, err
		}
		fallthrough
	case cudaipc.HostDevice:
		return host.Open(host.Options{ArenaFD: s.ArenaFD, ArenaSize: s.ArenaSize, FireOnDeath: s.FireOnDeath, Populate: s.Populate})
	case cudaipc.CUDADevice:
		return openMovedCUDA(s)
	}
	return nil, fmt.Errorf("device %q, allowed: %s, %s: %w", s.Device, cudaipc.HostDevice, cudaipc.CUDADevice, cudaipc.ErrKind)
}

// openMovedCUDA opens the GPU of a setup over the pool's arena, which the device pins in the background.
func openMovedCUDA(s Setup) (cudaipc.Device, error) {
	open := openGPU
	if s.Measure && cuda.Built {
		open = openWitnessed
	}
	d, err := open(&s)
	if err != nil {
		return nil, err
	}
	return d, nil
}

func openGPU(s *Setup) (*cuda.Device, error) {
	return cuda.Open(cuda.Options{GPU: s.GPU, ArenaFD: s.ArenaFD, ArenaSize: s.ArenaSize, Tables: s.Tables, Facts: s.Facts})
}

// deviceInfo is what a device has to say of itself, JSON; nothing, if it has nothing to say.
func deviceInfo(d cudaipc.Device) []byte {
	c, ok := d.(interface{ Info() cudaipc.CUDAInfo })
	if !ok {
		return nil
	}
	text, err := json.Marshal(c.Info())
	if err != nil {
		return nil // it has texts and numbers only
	}
	return text
}

//go:build cuda

package cudaipc

import (
	"encoding/json"
	"fmt"
)

// openMovedCUDA opens the GPU of a setup over the pool's arena, which the device pins in the background.
func openMovedCUDA(s MoverSetup) (Device, error) {
	open := openGPU
	if s.Measure {
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

// seeGPUs says why no GPU can be seen; nil: at least one is.
func seeGPUs() error {
	gpus, err := listGPUs()
	if err == nil && len(gpus) == 0 {
		err = fmt.Errorf("%w: the driver sees no GPU", ErrNoCUDA)
	}
	return err
}

package cudaipc

import "fmt"

// openMovedCUDA opens the GPU of a setup over the pool's arena.
func openMovedCUDA(s MoverSetup) (Device, error) {
	return nil, fmt.Errorf("GPU %v: %w: this program is built without it", s.GPU, ErrNoCUDA)
}

// deviceInfo is what a device has to say of itself, JSON; nothing, if it has nothing to say.
func deviceInfo(Device) []byte { return nil }

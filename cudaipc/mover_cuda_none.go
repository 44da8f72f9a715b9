//go:build !cuda

package cudaipc

import "fmt"

func openMovedCUDA(s MoverSetup) (Device, error) {
	return nil, fmt.Errorf("GPU %v: %w", s.GPU, seeGPUs())
}

func runWitness() error { return seeGPUs() }

func deviceInfo(Device) []byte { return nil }

func seeGPUs() error {
	return fmt.Errorf("%w: this program is built without it (build tag cuda)", ErrNoCUDA)
}

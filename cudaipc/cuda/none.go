//go:build !cuda

package cuda

import (
	"fmt"

	"github.com/kvagent/kvagent/cudaipc"
)

// Device is the device on a GPU's memory, which this program is built without.
type Device struct{ cudaipc.Device }

// Built reports whether this program is built with the device.
const Built = false

// Open returns ErrNoCUDA.
func Open(o Options) (*Device, error) { return nil, fmt.Errorf("GPU %v: %w", o.GPU, errNotBuilt) }

// Info is never called: there is no device.
func (*Device) Info() cudaipc.CUDAInfo { return cudaipc.CUDAInfo{Lost: errNotBuilt.Error()} }

var errNotBuilt = fmt.Errorf("%w: this program is built without it (build tag cuda)", cudaipc.ErrNoCUDA)

// SeeGPUs returns why no GPU is visible.
func SeeGPUs() error { return errNotBuilt }

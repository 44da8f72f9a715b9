//go:build !cuda

package cudaipc

import (
	"fmt"
	"time"
)

// CUDA is the device on a GPU's memory. This program is built without it.
type CUDA struct{ Device }

// HasCUDA says whether this program is built with the device.
const HasCUDA = false

// OpenCUDA answers ErrNoCUDA.
func OpenCUDA(o CUDAOptions) (*CUDA, error) { return nil, fmt.Errorf("GPU %v: %w", o.GPU, errNotBuilt) }

// Info is never called: there is no device.
func (*CUDA) Info() CUDAInfo { return CUDAInfo{Lost: errNotBuilt.Error()} }

// Lost is never called: there is no device.
func (*CUDA) Lost() <-chan struct{} { return nil }

// LostBy is never called: there is no device.
func (*CUDA) LostBy() error { return errNotBuilt }

// Calibrate is never called: there is no device.
func (*CUDA) Calibrate(time.Duration) (CopyTable, error) { return CopyTable{}, errNotBuilt }

var errNotBuilt = fmt.Errorf("%w: this program is built without it (build tag cuda)", ErrNoCUDA)

// SeeGPUs says why no GPU can be seen.
func SeeGPUs() error { return errNotBuilt }

// Learn is never called: there is no device.
func (*CUDA) Learn(GPUFacts) {}

// Raw is never called: there is no device.
func (*CUDA) Raw(int64, int) (RawCopies, error) { return RawCopies{}, errNotBuilt }

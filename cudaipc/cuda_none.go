//go:build !cuda

package cudaipc

import "fmt"

// CUDA is the device on a GPU's memory. This program is built without it.
type CUDA struct{ Device }

// OpenCUDA answers ErrNoCUDA.
func OpenCUDA(CUDAOptions) (*CUDA, error) { return nil, errNotBuilt }

// Info is never called: there is no device.
func (*CUDA) Info() CUDAInfo { return CUDAInfo{Lost: errNotBuilt.Error()} }

// Lost is never called: there is no device.
func (*CUDA) Lost() <-chan struct{} { return nil }

// LostBy is never called: there is no device.
func (*CUDA) LostBy() error { return errNotBuilt }

// Calibrate is never called: there is no device.
func (*CUDA) Calibrate() (CopyTable, error) { return CopyTable{}, errNotBuilt }

var errNotBuilt = fmt.Errorf("%w: this program is built without it (build tag cuda)", ErrNoCUDA)

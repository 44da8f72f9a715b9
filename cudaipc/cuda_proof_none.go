//go:build !cuda

package cudaipc

// Raw is never called: there is no device.
func (*CUDA) Raw(int64, int) (RawCopies, error) { return RawCopies{}, errNotBuilt }

// Fill is never called: there is no engine.
func (*CUDAStream) Fill(*CUDAMemory, int64, int64, uint32) {}

// Finish is never called: there is no engine.
func (*CUDAStream) Finish() {}

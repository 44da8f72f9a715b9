//go:build !cuda

package cudaipc

// CUDAEngine is the engine's side of the CUDA device. This program is built without it, so that none of its methods is ever called.
type CUDAEngine struct{ *HostEngine }

// CUDAMemory is a stretch of GPU memory.
type CUDAMemory struct{ *HostMemory }

// CUDAStream is a stream of an engine.
type CUDAStream struct{ *HostStream }

// NewCUDAEngine answers ErrNoCUDA.
func NewCUDAEngine(UUID, uint32, uint32) (*CUDAEngine, error) { return nil, SeeGPUs() }

// GPU is where the engine's memory is.
func (*CUDAEngine) GPU() UUID { return UUID{} }

// Alloc makes GPU memory.
func (*CUDAEngine) Alloc(RegionID, int64) (*CUDAMemory, error) { return nil, SeeGPUs() }

// AllocTogether makes several stretches in one allocation.
func (*CUDAEngine) AllocTogether([]RegionID, []int64) ([]*CUDAMemory, error) { return nil, SeeGPUs() }

// AllocVirtual makes a stretch of pieces of virtual memory.
func (*CUDAEngine) AllocVirtual(RegionID, int64, int64) (*CUDAMemory, error) { return nil, SeeGPUs() }

// NewStream starts a stream.
func (*CUDAEngine) NewStream() *CUDAStream { return nil }

// Fill is never called: there is no engine.
func (*CUDAStream) Fill(*CUDAMemory, int64, int64, uint32) {}

// Finish is never called: there is no engine.
func (*CUDAStream) Finish() {}

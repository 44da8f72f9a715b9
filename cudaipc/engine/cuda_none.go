//go:build !cuda

package engine

import (
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
)

// CUDA is the engine's side of the CUDA device. This program is built without it, so that none of
// its methods is ever called.
type CUDA struct{ *Host }

// CUDAMemory is a stretch of GPU memory.
type CUDAMemory struct{ *HostMemory }

// CUDAStream is a stream of an engine.
type CUDAStream struct{ *HostStream }

// NewCUDA answers ErrNoCUDA.
func NewCUDA(cudaipc.UUID, uint32, uint32) (*CUDA, error) { return nil, cuda.SeeGPUs() }

// GPU returns where the engine's memory is.
func (*CUDA) GPU() cudaipc.UUID { return cudaipc.UUID{} }

// Alloc makes GPU memory.
func (*CUDA) Alloc(cudaipc.RegionID, int64) (*CUDAMemory, error) { return nil, cuda.SeeGPUs() }

// AllocTogether makes several stretches in one allocation.
func (*CUDA) AllocTogether([]cudaipc.RegionID, []int64) ([]*CUDAMemory, error) {
	return nil, cuda.SeeGPUs()
}

// AllocVirtual makes a stretch of pieces of virtual memory.
func (*CUDA) AllocVirtual(cudaipc.RegionID, int64, int64) (*CUDAMemory, error) {
	return nil, cuda.SeeGPUs()
}

// NewStream starts a stream.
func (*CUDA) NewStream() *CUDAStream { return nil }

// Fill is never called: there is no engine.
func (*CUDAStream) Fill(*CUDAMemory, int64, int64, uint32) {}

// Finish is never called: there is no engine.
func (*CUDAStream) Finish() {}

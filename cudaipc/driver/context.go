//go:build cuda

package driver

// #include <cuda.h>
import "C"

import (
	"errors"
	"runtime"

	"gorgonia.org/cu"
)

// Context is the primary context of a GPU, which all of a process shares. No other context is
// made.
type Context struct {
	device cu.Device
	handle cu.CUContext
}

// Retain opens a GPU's primary context. Its threads sleep while they wait. Kernels get no heap,
// no print buffer and small stacks: those take GPU memory that the engine could have.
func Retain(ordinal int) (*Context, error) {
	device, err := cu.GetDevice(ordinal)
	if err != nil {
		return nil, of("cuDeviceGet", err)
	}
	// Refused where the context is in use with other flags already, which is harmless.
	_ = C.cuDevicePrimaryCtxSetFlags(C.CUdevice(device), C.CU_CTX_SCHED_BLOCKING_SYNC)
	handle, err := device.RetainPrimaryCtx()
	if err != nil {
		return nil, of("cuDevicePrimaryCtxRetain", err)
	}
	return &Context{device: device, handle: handle}, nil
}

// Enter locks the calling goroutine to its thread and makes the context current there, until the
// goroutine ends. A goroutine calls it once, first.
func (c *Context) Enter() error {
	runtime.LockOSThread()
	return of("cuCtxSetCurrent", cu.SetCurrentContext(c.handle))
}

// Lower reduces the default limits of kernels: a quarter of the stack for each thread that the
// GPU can run at once, no print buffer, no heap. A limit that the driver refuses to change stays.
func (c *Context) Lower() {
	for limit, bytes := range map[cu.Limit]int64{cu.StackSize: 1 << 8, cu.PrintfFIFOSize: 0, cu.MallocHeapSize: 0} {
		_ = cu.SetLimit(limit, bytes)
	}
}

// Limits returns the context's limits of kernels, bytes: stack of a thread, print buffer, heap.
// -1: unknown.
func (c *Context) Limits() (stack, printing, heap int64) {
	of := func(limit cu.Limit) int64 {
		if bytes, err := cu.Limits(limit); err == nil {
			return bytes
		}
		return -1
	}
	return of(cu.StackSize), of(cu.PrintfFIFOSize), of(cu.MallocHeapSize)
}

// Memory returns the GPU's free memory, over all processes, and its total, bytes.
func (c *Context) Memory() (free, total int64, err error) {
	free, total, err = cu.MemInfo()
	return free, total, of("cuMemGetInfo", err)
}

// MaxPitch returns the longest distance between rows of a rectangle, bytes.
func (c *Context) MaxPitch() (uint64, error) {
	n, err := c.device.Attribute(cu.MaxPitch)
	return uint64(n), of("cuDeviceGetAttribute", err)
}

// Release releases the context. No thread uses it any more.
func (c *Context) Release() error {
	return of("cuDevicePrimaryCtxRelease", c.device.ReleasePrimaryCtx())
}

// IsSticky reports whether err is an error of the driver that no later call survives.
func IsSticky(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Sticky()
}

// CodeOf returns the CUresult in err, or 0.
func CodeOf(err error) int {
	var e *Error
	if !errors.As(err, &e) {
		return 0
	}
	return e.Code
}

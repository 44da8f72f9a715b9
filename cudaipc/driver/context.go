//go:build cuda

package driver

// #include <cuda.h>
import "C"

import (
	"errors"
	"runtime"

	"gorgonia.org/cu"
)

// Context is the primary context of a GPU: the one that all of a process shares, and no other is
// made.
type Context struct {
	device cu.Device
	handle cu.CUContext
}

// Retain opens a GPU's primary context. A thread that waits in it sleeps; there are no heap, no
// print buffer and small stacks for kernels: they are GPU memory that the engine could have.
func Retain(ordinal int) (*Context, error) {
	device, err := cu.GetDevice(ordinal)
	if err != nil {
		return nil, of("cuDeviceGet", err)
	}
	// Refused where the context is in use with other flags already, which is no harm.
	_ = C.cuDevicePrimaryCtxSetFlags(C.CUdevice(device), C.CU_CTX_SCHED_BLOCKING_SYNC)
	handle, err := device.RetainPrimaryCtx()
	if err != nil {
		return nil, of("cuDevicePrimaryCtxRetain", err)
	}
	return &Context{device: device, handle: handle}, nil
}

// Enter ties the calling goroutine to its thread and makes the context current there, until the
// goroutine ends. It is called once, first thing.
func (c *Context) Enter() error {
	runtime.LockOSThread()
	return of("cuCtxSetCurrent", cu.SetCurrentContext(c.handle))
}

// Lower takes what kernels would get of GPU memory by default: a quarter of the stack for each
// thread that the GPU can run at once, no buffer for printing, no heap. What the driver refuses
// stays as it is.
func (c *Context) Lower() {
	for limit, bytes := range map[cu.Limit]int64{cu.StackSize: 1 << 8, cu.PrintfFIFOSize: 0, cu.MallocHeapSize: 0} {
		_ = cu.SetLimit(limit, bytes)
	}
}

// Limits returns what the driver gives kernels of the context, bytes: of the stack of a thread, for
// printing, for a heap. -1: it does not say.
func (c *Context) Limits() (stack, printing, heap int64) {
	of := func(limit cu.Limit) int64 {
		if bytes, err := cu.Limits(limit); err == nil {
			return bytes
		}
		return -1
	}
	return of(cu.StackSize), of(cu.PrintfFIFOSize), of(cu.MallocHeapSize)
}

// Memory returns how much of the GPU's memory is free, for all processes, and how much there is,
// bytes.
func (c *Context) Memory() (free, total int64, err error) {
	free, total, err = cu.MemInfo()
	return free, total, of("cuMemGetInfo", err)
}

// MaxPitch returns the longest distance of the rows of a rectangle, bytes.
func (c *Context) MaxPitch() (uint64, error) {
	n, err := c.device.Attribute(cu.MaxPitch)
	return uint64(n), of("cuDeviceGetAttribute", err)
}

// Release releases the context. No thread uses it any more.
func (c *Context) Release() error {
	return of("cuDevicePrimaryCtxRelease", c.device.ReleasePrimaryCtx())
}

// IsSticky reports whether err is of the driver, and of a kind that no later call survives.
func IsSticky(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Sticky()
}

// CodeOf returns the CUresult in err, 0 if there is none.
func CodeOf(err error) int {
	var e *Error
	if !errors.As(err, &e) {
		return 0
	}
	return e.Code
}

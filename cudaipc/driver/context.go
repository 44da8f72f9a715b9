//go:build cuda

package driver

/*
#include <cuda.h>
#include "shim.h"

// In a process that sees a MIG instance, the second form gives the instance's UUID and the first
// the whole GPU's.
static CUresult kvdrv_uuid(CUuuid *u, CUdevice d) {
	CUresult (*second)(CUuuid *, CUdevice) = (CUresult (*)(CUuuid *, CUdevice))kvdrv_symbol("cuDeviceGetUuid_v2");
	return second ? second(u, d) : cuDeviceGetUuid(u, d);
}
*/
import "C"

import (
	"errors"
	"runtime"
	"unsafe"

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

// Role is a goroutine with an OS thread of its own and a current context. Only roles call the
// driver. A role ends with its thread. A nil role, which did not start, does nothing.
type Role struct {
	work  chan func()
	over  chan struct{} // closed by Close
	ended chan struct{}
}

// StartRole starts a role that runs the functions of Do until Close.
func StartRole(ctx *Context) (*Role, error) {
	r := &Role{work: make(chan func()), over: make(chan struct{}), ended: make(chan struct{})}
	entered := make(chan error)
	go func() {
		defer close(r.ended)
		err := ctx.Enter()
		entered <- err
		if err == nil {
			r.serve()
		}
	}()
	if err := <-entered; err != nil {
		<-r.ended
		return nil, err
	}
	return r, nil
}

func (r *Role) serve() {
	for {
		select {
		case f := <-r.work:
			f()
		case <-r.over:
			return
		}
	}
}

// Do runs f in the role and waits for its end. It returns without running f if the role is
// closed, also meanwhile.
func (r *Role) Do(f func()) {
	if r == nil {
		return
	}
	done := make(chan struct{})
	select {
	case r.work <- func() {
		defer close(done)
		f()
	}:
		<-done
	case <-r.over:
	}
}

// Begin runs f in the role for as long as the role lives. No other function is passed to it.
func (r *Role) Begin(f func()) { r.work <- f }

// Close waits for the role's end, after its current function.
func (r *Role) Close() {
	if r == nil {
		return
	}
	close(r.over)
	<-r.ended
}

// GPU is one GPU, or MIG instance, that this process sees.
type GPU struct {
	Ordinal int // in this process
	Name    string
	UUID    [16]byte // the instance's, where there is one
}

// GPUs lists the GPUs that this process sees.
func GPUs() ([]GPU, error) {
	n, err := cu.NumDevices()
	if err != nil {
		return nil, of("cuDeviceGetCount", err)
	}
	list := make([]GPU, n)
	for i := range list {
		if list[i], err = describe(i); err != nil {
			return nil, err
		}
	}
	return list, nil
}

func describe(ordinal int) (GPU, error) {
	g := GPU{Ordinal: ordinal}
	device, err := cu.GetDevice(ordinal)
	if err != nil {
		return g, of("cuDeviceGet", err)
	}
	if g.Name, err = device.Name(); err != nil {
		return g, of("cuDeviceGetName", err)
	}
	code := C.kvdrv_uuid((*C.CUuuid)(unsafe.Pointer(&g.UUID)), C.CUdevice(device))
	return g, check("cuDeviceGetUuid", int(code))
}

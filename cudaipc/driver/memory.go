//go:build cuda

package driver

/*
#include <cuda.h>
#include <string.h>

// Handles go by value.
static CUresult kvdrv_ipc_open(CUdeviceptr *p, const void *bytes) {
	CUipcMemHandle h;
	memcpy(&h, bytes, sizeof h);
	return cuIpcOpenMemHandle(p, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}
_Static_assert(sizeof(CUipcMemHandle) == 64 && sizeof(CUipcEventHandle) == 64, "the handles of CUDA IPC have 64 bytes");
*/
import "C"

import (
	"unsafe"

	"gorgonia.org/cu"
)

// Addr is an address in the GPU's address space. This process cannot access it.
type Addr uint64

// Handle is an allocation's or an event's, for another process to open.
type Handle [64]byte

// Alloc allocates GPU memory that can be exported.
func Alloc(size int64) (Addr, error) {
	p, err := cu.MemAlloc(size)
	return Addr(p), of("cuMemAlloc", err)
}

// Free frees memory of Alloc.
func Free(a Addr) error { return of("cuMemFree", cu.MemFree(cu.DevicePtr(a))) }

// AllocationOf returns the allocation that contains an address.
func AllocationOf(a Addr) (base Addr, size uint64, err error) {
	n, p, err := cu.DevicePtr(a).AddressRange()
	return Addr(p), uint64(n), of("cuMemGetAddressRange", err)
}

// ExportMemory makes the handle of the allocation that a is in.
func ExportMemory(a Addr) (h Handle, err error) {
	var c C.CUipcMemHandle
	err = check("cuIpcGetMemHandle", int(C.cuIpcGetMemHandle(&c, C.CUdeviceptr(a))))
	return *(*Handle)(unsafe.Pointer(&c)), err
}

// OpenMemory opens another process's allocation and returns its start.
func OpenMemory(h *Handle) (Addr, error) {
	var p C.CUdeviceptr
	err := check("cuIpcOpenMemHandle", int(C.kvdrv_ipc_open(&p, unsafe.Pointer(h))))
	return Addr(p), err
}

// CloseMemory closes memory of OpenMemory.
func CloseMemory(a Addr) error {
	return check("cuIpcCloseMemHandle", int(C.cuIpcCloseMemHandle(C.CUdeviceptr(a))))
}

// Write copies bytes to the GPU and returns when they are there.
func Write(a Addr, p []byte) error {
	if len(p) == 0 {
		return nil
	}
	return settled(of("cuMemcpyHtoD", cu.MemcpyHtoD(cu.DevicePtr(a), unsafe.Pointer(&p[0]), int64(len(p)))))
}

// settled waits for the default stream after a call without an error: a copy may return when
// bytes that are not pinned are staged, and a fill when it has begun (driver reference, "API
// synchronization behavior"). It does not wait for streams of NewStream.
func settled(err error) error {
	if err != nil {
		return err
	}
	return check("cuStreamSynchronize", int(C.cuStreamSynchronize(nil)))
}

// Read copies bytes from the GPU.
func Read(p []byte, a Addr) error {
	if len(p) == 0 {
		return nil
	}
	return of("cuMemcpyDtoH", cu.MemcpyDtoH(unsafe.Pointer(&p[0]), cu.DevicePtr(a), int64(len(p))))
}

// Clear sets bytes to zero and returns when they are.
func Clear(a Addr, size int64) error {
	return settled(of("cuMemsetD8", cu.MemsetD8(cu.DevicePtr(a), 0, size)))
}

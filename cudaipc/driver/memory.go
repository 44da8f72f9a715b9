//go:build cuda

package driver

/*
#include <cuda.h>
#include <stdint.h>
#include <string.h>

// Handles go by value.
static CUresult kvdrv_ipc_open(CUdeviceptr *p, const void *bytes) {
	CUipcMemHandle h;
	memcpy(&h, bytes, sizeof h);
	return cuIpcOpenMemHandle(p, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}
_Static_assert(sizeof(CUipcMemHandle) == 64 && sizeof(CUipcEventHandle) == 64, "the handles of CUDA IPC have 64 bytes");

static CUmemAllocationProp kvdrv_prop(int ordinal) {
	CUmemAllocationProp p = {0};
	p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	p.location.id = ordinal;
	return p;
}
static CUresult kvdrv_granularity(size_t *n, int ordinal) {
	CUmemAllocationProp p = kvdrv_prop(ordinal);
	return cuMemGetAllocationGranularity(n, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
}
static CUresult kvdrv_create(CUmemGenericAllocationHandle *h, size_t size, int ordinal) {
	CUmemAllocationProp p = kvdrv_prop(ordinal);
	return cuMemCreate(h, size, &p, 0);
}
static CUresult kvdrv_export(int *fd, CUmemGenericAllocationHandle h) {
	return cuMemExportToShareableHandle(fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}
static CUresult kvdrv_import(CUmemGenericAllocationHandle *h, int fd) {
	return cuMemImportFromShareableHandle(h, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}
static CUresult kvdrv_access(CUdeviceptr p, size_t size, int ordinal) {
	CUmemAccessDesc d = {0};
	d.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	d.location.id = ordinal;
	d.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	return cuMemSetAccess(p, size, &d, 1);
}
*/
import "C"

import (
	"errors"
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

// Range is a range of addresses with pieces of physical memory in it, side by side.
type Range struct {
	Start  Addr
	Size   uint64
	mapped []uint64 // sizes of the pieces, in their order
	used   uint64   // bytes of these
}

// Whole returns n rounded up to whole granules.
func Whole(n, granule uint64) uint64 { return (n + granule - 1) / granule * granule }

// NewRange reserves a range in which nothing is mapped yet.
func NewRange(size uint64) (*Range, error) {
	var a C.CUdeviceptr
	err := check("cuMemAddressReserve", int(C.cuMemAddressReserve(&a, C.size_t(size), 0, 0, 0)))
	return &Range{Start: Addr(a), Size: size}, err
}

// Map maps a whole piece after those that are mapped already.
func (r *Range) Map(p Physical, size uint64) error {
	at := C.CUdeviceptr(r.Start + Addr(r.used))
	err := check("cuMemMap", int(C.cuMemMap(at, C.size_t(size), 0, C.CUmemGenericAllocationHandle(p), 0)))
	if err == nil {
		r.mapped = append(r.mapped, size)
		r.used += size
	}
	return err
}

// Close unmaps the pieces, each as it was mapped, and releases the range.
func (r *Range) Close() error {
	var errs []error
	at := C.CUdeviceptr(r.Start)
	for _, n := range r.mapped {
		errs = append(errs, check("cuMemUnmap", int(C.cuMemUnmap(at, C.size_t(n)))))
		at += C.CUdeviceptr(n)
	}
	free := int(C.cuMemAddressFree(C.CUdeviceptr(r.Start), C.size_t(r.Size)))
	return errors.Join(append(errs, check("cuMemAddressFree", free))...)
}

// Physical is a piece of physical GPU memory. It has no address until it is mapped.
type Physical uint64

// Granularity returns the unit of sizes of physical memory, bytes.
func (c *Context) Granularity() (uint64, error) {
	var n C.size_t
	err := check("cuMemGetAllocationGranularity", int(C.kvdrv_granularity(&n, C.int(c.device))))
	return uint64(n), err
}

// Create makes a piece that can be exported as a file descriptor.
func (c *Context) Create(size uint64) (Physical, error) {
	var h C.CUmemGenericAllocationHandle
	err := check("cuMemCreate", int(C.kvdrv_create(&h, C.size_t(size), C.int(c.device))))
	return Physical(h), err
}

// Export makes a descriptor of a piece. It is the caller's.
func (p Physical) Export() (int, error) {
	var fd C.int
	err := check("cuMemExportToShareableHandle", int(C.kvdrv_export(&fd, C.CUmemGenericAllocationHandle(p))))
	return int(fd), err
}

// ImportPhysical opens another process's piece. The descriptor stays the caller's.
func ImportPhysical(fd int) (Physical, error) {
	var h C.CUmemGenericAllocationHandle
	err := check("cuMemImportFromShareableHandle", int(C.kvdrv_import(&h, C.int(fd))))
	return Physical(h), err
}

// Release releases a piece. Its mappings keep its memory.
func (p Physical) Release() error {
	return check("cuMemRelease", int(C.cuMemRelease(C.CUmemGenericAllocationHandle(p))))
}

// Allow lets the context's GPU read and write what is mapped in a range.
func (c *Context) Allow(a Addr, size uint64) error {
	return check("cuMemSetAccess", int(C.kvdrv_access(C.CUdeviceptr(a), C.size_t(size), C.int(c.device))))
}

// Register pins memory of this process that is not Go's, for all contexts.
func Register(mem []byte) error {
	code := C.cuMemHostRegister(unsafe.Pointer(&mem[0]), C.size_t(len(mem)),
		C.CU_MEMHOSTREGISTER_PORTABLE|C.CU_MEMHOSTREGISTER_DEVICEMAP)
	return check("cuMemHostRegister", int(code))
}

// Unregister unpins memory of Register.
func Unregister(mem []byte) error {
	return check("cuMemHostUnregister", int(C.cuMemHostUnregister(unsafe.Pointer(&mem[0]))))
}

// AllocPinned allocates pinned memory.
func AllocPinned(size int) ([]byte, error) {
	var p unsafe.Pointer
	if err := check("cuMemHostAlloc", int(C.cuMemHostAlloc(&p, C.size_t(size),
		C.CU_MEMHOSTALLOC_PORTABLE))); err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), size), nil
}

// FreePinned frees memory of AllocPinned.
func FreePinned(mem []byte) error {
	return check("cuMemFreeHost", int(C.cuMemFreeHost(unsafe.Pointer(&mem[0]))))
}

// Address returns the GPU's address of pinned memory.
func Address(mem []byte) (Addr, error) {
	var a C.CUdeviceptr
	err := check("cuMemHostGetDevicePointer", int(C.cuMemHostGetDevicePointer(&a, unsafe.Pointer(&mem[0]), 0)))
	return Addr(a), err
}

// HostAddr returns this process's address of memory, as copies take it.
func HostAddr(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

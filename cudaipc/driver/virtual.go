//go:build cuda

package driver

/*
#include <cuda.h>
#include <stdint.h>

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

// Reserve reserves a range of addresses.
func Reserve(size uint64) (Addr, error) {
	var a C.CUdeviceptr
	err := check("cuMemAddressReserve", int(C.cuMemAddressReserve(&a, C.size_t(size), 0, 0, 0)))
	return Addr(a), err
}

// Unreserve releases a range in which nothing is mapped any more.
func Unreserve(a Addr, size uint64) error {
	return check("cuMemAddressFree", int(C.cuMemAddressFree(C.CUdeviceptr(a), C.size_t(size))))
}

// Map puts a whole piece at an address of a reserved range.
func (p Physical) Map(a Addr, size uint64) error {
	return check("cuMemMap", int(C.cuMemMap(C.CUdeviceptr(a), C.size_t(size), 0, C.CUmemGenericAllocationHandle(p), 0)))
}

// Unmap unmaps whole pieces.
func Unmap(a Addr, size uint64) error {
	return check("cuMemUnmap", int(C.cuMemUnmap(C.CUdeviceptr(a), C.size_t(size))))
}

// Allow lets the context's GPU read and write what is mapped in a range.
func (c *Context) Allow(a Addr, size uint64) error {
	return check("cuMemSetAccess", int(C.kvdrv_access(C.CUdeviceptr(a), C.size_t(size), C.int(c.device))))
}

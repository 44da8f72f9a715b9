//go:build cuda

package driver

// #include <cuda.h>
import "C"

import "unsafe"

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

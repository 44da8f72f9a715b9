//go:build cuda

package driver

/*
#include <cuda.h>
#include <stdlib.h>

static CUresult kvdrv_launch_list(CUfunction f, unsigned blocks, unsigned threads, uint64_t list, uint32_t count,
	CUstream s) {
	void *params[] = {&list, &count};
	return cuLaunchKernel(f, blocks, 1, 1, threads, 1, 1, 0, s, params, NULL);
}
*/
import "C"

import (
	"errors"
	"unsafe"
)

// Kernel is a function in a module of its own. Its parameters are the address of a list, u64, and
// the number of its entries, u32.
type Kernel struct {
	module   C.CUmodule
	function C.CUfunction
}

// LoadKernel compiles a module's text for the GPU of the context, which takes milliseconds, and
// finds a function in it.
func LoadKernel(text, name string) (*Kernel, error) {
	image, symbol := C.CString(text), C.CString(name)
	defer C.free(unsafe.Pointer(image))
	defer C.free(unsafe.Pointer(symbol))
	k := &Kernel{}
	if err := check("cuModuleLoadData", int(C.cuModuleLoadData(&k.module, unsafe.Pointer(image)))); err != nil {
		return nil, err
	}
	if err := check("cuModuleGetFunction", int(C.cuModuleGetFunction(&k.function, k.module, symbol))); err != nil {
		return nil, errors.Join(err, k.Unload())
	}
	return k, nil
}

// Launch starts the kernel on a stream. The list is read when the stream reaches it.
func (k *Kernel) Launch(s Stream, blocks, threads uint32, list Addr, count uint32) error {
	code := C.kvdrv_launch_list(k.function, C.uint(blocks), C.uint(threads), C.uint64_t(list), C.uint32_t(count),
		s.handle())
	return check("cuLaunchKernel", int(code))
}

// Unload unloads the module. No launch is in flight.
func (k *Kernel) Unload() error { return check("cuModuleUnload", int(C.cuModuleUnload(k.module))) }

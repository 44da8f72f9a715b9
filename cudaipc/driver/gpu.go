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
	"unsafe"

	"gorgonia.org/cu"
)

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

/* The calls of the CUDA driver that kvagent.cuda.driver makes, with the driver API's own prototypes, over two pieces of
 * made-up memory: MALLOC_BASE of "cudaMalloc", and VIRTUAL_BASE of virtual memory in two pieces. Test use only. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;

#define MALLOC_BASE 0x7f5500000000ULL
#define VIRTUAL_BASE 0x7f6600000000ULL
#define PIECE (2ULL << 20)
#define INVALID_VALUE 1

int held; /* allocation handles that are not released */

static int on_malloc(CUdeviceptr p) { return p >= MALLOC_BASE && p < MALLOC_BASE + PIECE; }
static int on_virtual(CUdeviceptr p) { return p >= VIRTUAL_BASE && p < VIRTUAL_BASE + 2 * PIECE; }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
	*device = ordinal * 10;
	return ordinal == 3 ? 0 : 101;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
	memset(uuid->bytes, device, sizeof uuid->bytes);
	return device == 30 ? 0 : 101;
}

CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr p) {
	if (!on_malloc(p) && !on_virtual(p)) return INVALID_VALUE;
	switch (attribute) {
	case 9: *(int *)data = 3; return 0;                                     /* DEVICE_ORDINAL */
	case 10: *(unsigned char *)data = (unsigned char)on_malloc(p); return 0; /* IS_LEGACY_CUDA_IPC_CAPABLE, a bool */
	case 14: *(uint64_t *)data = on_virtual(p) ? 9 : 0; return 0; /* ALLOWED_HANDLE_TYPES: descriptor, fabric */
	}
	return INVALID_VALUE;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr p) {
	if (!on_malloc(p) && !on_virtual(p)) return INVALID_VALUE;
	*base = on_malloc(p) ? MALLOC_BASE : VIRTUAL_BASE + (p - VIRTUAL_BASE) / PIECE * PIECE;
	*size = PIECE;
	return 0;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr p) {
	if (p != MALLOC_BASE) return INVALID_VALUE;
	memset(handle->reserved, 'i', sizeof handle->reserved);
	return 0;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *p) {
	if (!on_virtual((CUdeviceptr)(uintptr_t)p)) return INVALID_VALUE;
	*handle = 0xabcdef0000000000ULL + ((CUdeviceptr)(uintptr_t)p - VIRTUAL_BASE) / PIECE;
	held++;
	return 0;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags) {
	if (type != 1 || flags != 0 || handle < 0xabcdef0000000000ULL) return INVALID_VALUE;
	*(int *)shareable = memfd_create(handle == 0xabcdef0000000000ULL ? "piece 0" : "piece 1", MFD_CLOEXEC);
	return 0;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
	held--;
	return handle >= 0xabcdef0000000000ULL ? 0 : INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult result, const char **text) {
	*text = result == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_INVALID_DEVICE";
	return 0;
}

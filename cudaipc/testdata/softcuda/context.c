// Devices and contexts.
#include "softcuda.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { STACK = 16 };
static struct CUctx_st primary[MAX_DEVICES];
static bool charged[MAX_DEVICES]; // context_bytes are taken
static _Thread_local CUcontext stack[STACK];
static _Thread_local int depth;

CUcontext context_current(void) { return depth ? stack[depth - 1] : NULL; }
bool device_ok(CUdevice d) { return d >= first_device && d < first_device + device_count; }
#define DEVICE(d) do { ENTER(); if (!device_ok(d)) return CUDA_ERROR_INVALID_DEVICE; } while (0)

CUresult cuDeviceGetCount(int *n) { ENTER(); *n = device_count; return 0; }
CUresult cuDeviceGet(CUdevice *d, int ordinal) {
	DEVICE(first_device + ordinal);
	*d = first_device + ordinal;
	return 0;
}
CUresult cuDeviceGetName(char *name, int len, CUdevice d) {
	DEVICE(d);
	snprintf(name, (size_t)len, "Software CUDA device %d", d);
	return 0;
}
CUresult cuDeviceTotalMem(size_t *n, CUdevice d) { DEVICE(d); *n = device_bytes; return 0; }
CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice d) {
	DEVICE(d);
	snprintf(id, (size_t)len, "0000:%02x:00.0", d + 1);
	return 0;
}
CUresult cuDeviceCanAccessPeer(int *can, CUdevice d, CUdevice peer) { DEVICE(d); DEVICE(peer); *can = 0; return 0; }

CUresult cuDeviceGetUuid(CUuuid *u, CUdevice d) {
	DEVICE(d);
	memcpy(u->bytes, "softcuda-device", 15);
	u->bytes[15] = (char)d;
	return 0;
}
CUresult cuDeviceGetUuid_v2(CUuuid *u, CUdevice d) { return cuDeviceGetUuid(u, d); }

CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
	DEVICE(d);
	static const struct { CUdevice_attribute a; int v; } known[] = {
		{CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 1}, {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
		{CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32}, {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 0x7fffffff},
		{CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9}, {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
		{CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1}, {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
		{CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
		{CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
		{CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
		{CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
		{CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
		{CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 1},
		{CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, -1}};
	*v = a == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID ? d + 1 : 0;
	for (size_t i = 0; i < sizeof known / sizeof *known; i++)
		if (known[i].a == a)
			*v = known[i].v;
	return 0;
}

// charge takes what a context takes of its device, once for a process, whose end gives it back.
static CUresult charge(CUdevice d) {
	if (charged[d] || !context_bytes)
		return CUDA_SUCCESS;
	int entry, fd;
	uint64_t uid;
	CUresult r = backing_create(context_bytes, d, &entry, &uid, &fd);
	if (!r)
		close(fd);
	charged[d] = !r;
	return r;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) {
	DEVICE(d);
	pthread_mutex_lock(&mine);
	CUresult r = charge(d);
	if (r) {
		pthread_mutex_unlock(&mine);
		return r;
	}
	if (!primary[d].refs) { // the drivers' defaults
		primary[d].limit[CU_LIMIT_STACK_SIZE] = 1024;
		primary[d].limit[CU_LIMIT_PRINTF_FIFO_SIZE] = 1 << 20;
		primary[d].limit[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20;
	}
	primary[d].device = d;
	primary[d].primary = true;
	primary[d].refs++;
	pthread_mutex_unlock(&mine);
	*c = &primary[d];
	return 0;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice d) {
	DEVICE(d);
	pthread_mutex_lock(&mine);
	bool held = primary[d].refs > 0;
	primary[d].refs -= held;
	pthread_mutex_unlock(&mine);
	return held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice d, unsigned int flags) { DEVICE(d); primary[d].flags = flags; return 0; }
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned int *flags, int *active) {
	DEVICE(d);
	*flags = primary[d].flags;
	*active = primary[d].refs > 0;
	return 0;
}

CUresult cuCtxPushCurrent(CUcontext c) {
	ENTER();
	if (!c || depth == STACK)
		return CUDA_ERROR_INVALID_VALUE;
	stack[depth++] = c;
	return 0;
}

CUresult cuCtxPopCurrent(CUcontext *c) {
	ENTER();
	if (!depth)
		return CUDA_ERROR_INVALID_CONTEXT;
	CUcontext top = stack[--depth];
	if (c)
		*c = top;
	return 0;
}

CUresult cuCtxSetCurrent(CUcontext c) {
	ENTER();
	if (depth)
		depth--;
	if (c)
		stack[depth++] = c;
	return 0;
}

CUresult cuCtxCreate(CUcontext *c, unsigned int flags, CUdevice d) {
	DEVICE(d);
	CUcontext n = calloc(1, sizeof *n);
	if (!n)
		return CUDA_ERROR_OUT_OF_MEMORY;
	n->device = d;
	n->refs = 1;
	n->flags = flags;
	*c = n;
	return cuCtxPushCurrent(n);
}

CUresult cuCtxDestroy(CUcontext c) {
	ENTER();
	if (!c || c->primary)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (context_current() == c)
		depth--;
	free(c);
	return 0;
}

CUresult cuCtxGetCurrent(CUcontext *c) { ENTER(); *c = context_current(); return 0; }
CUresult cuCtxGetDevice(CUdevice *d) { CONTEXT(c); *d = c->device; return 0; }
CUresult cuCtxGetFlags(unsigned int *f) { CONTEXT(c); *f = c->flags; return 0; }
CUresult cuCtxGetApiVersion(CUcontext x, unsigned int *v) { ENTER(); (void)x; *v = 3020; return 0; }
CUresult cuCtxSetLimit(CUlimit l, size_t v) {
	CONTEXT(c);
	if ((unsigned)l > 6) return CUDA_ERROR_UNSUPPORTED_LIMIT;
	c->limit[l] = v;
	return 0;
}
CUresult cuCtxGetLimit(size_t *v, CUlimit l) {
	CONTEXT(c);
	if ((unsigned)l > 6) return CUDA_ERROR_UNSUPPORTED_LIMIT;
	*v = c->limit[l];
	return 0;
}
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
	CONTEXT(c);
	if (least) *least = 0;
	if (greatest) *greatest = -5;
	return 0;
}

CUresult cuCtxSynchronize(void) {
	CONTEXT(c);
	count_total(TOTAL_DEVICE_SYNCS, 1);
	stream_drain_all(false);
	return sticky;
}

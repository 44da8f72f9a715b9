// Device memory, and what an address is.
#include "softcuda.h"
#include <unistd.h>

CUresult cuMemAlloc(CUdeviceptr *p, size_t n) {
	CONTEXT(c);
	if (!n)
		return CUDA_ERROR_INVALID_VALUE;
	int fd;
	segment s = {.size = n, .kind = ALLOCATED, .device = c->device, .refs = 1, .access = true};
	CUresult r = backing_create(n, c->device, &s.entry, &s.uid, &fd);
	if (r)
		return r;
	pthread_mutex_lock(&mine);
	s.va = window_reserve(n, 0);
	bool ok = s.va && window_map(s, fd) == 0;
	if (s.va && !ok)
		window_release(s.va);
	pthread_mutex_unlock(&mine);
	close(fd);
	if (!ok) {
		backing_drop(s.entry);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*p = s.va;
	return 0;
}

CUresult cuMemFree(CUdeviceptr p) {
	CONTEXT(c);
	if (!p)
		return 0;
	stream_drain_all(false);
	pthread_mutex_lock(&mine);
	segment *s = window_at(p);
	int entry = s && s->va == p && s->kind == ALLOCATED ? s->entry : -1;
	if (entry >= 0) {
		window_unmap(p);
		window_release(p);
	}
	pthread_mutex_unlock(&mine);
	if (entry < 0)
		return CUDA_ERROR_INVALID_VALUE;
	backing_drop(entry);
	return 0;
}

CUresult cuMemGetInfo(size_t *available, size_t *total) {
	CONTEXT(c);
	machine_lock();
	machine_sweep();
	uint64_t used = machine_used(c->device);
	machine_unlock();
	*total = device_bytes;
	*available = used > device_bytes ? 0 : device_bytes - used;
	return 0;
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr p) {
	CONTEXT(c);
	pthread_mutex_lock(&mine);
	segment *s = window_at(p);
	if (s && base)
		*base = s->va;
	if (s && bytes)
		*bytes = s->size;
	pthread_mutex_unlock(&mine);
	return s ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute a, CUdeviceptr p) {
	CONTEXT(c);
	pthread_mutex_lock(&mine);
	segment *found = window_at(p), s = found ? *found : (segment){0};
	pthread_mutex_unlock(&mine);
	if (!data || (!found && !host_pinned(p, 1)))
		return CUDA_ERROR_INVALID_VALUE;
	switch (a) {
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned *)data = found ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
		return 0;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = p; return 0;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)data = s.uid; return 0;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = found ? s.device : c->device; return 0;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
		*(unsigned char *)data = found && s.kind == ALLOCATED;
		return 0;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(CUdeviceptr *)data = s.va;
		return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)data = s.size;
		return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
	default: return CUDA_ERROR_NOT_SUPPORTED;
	}
}

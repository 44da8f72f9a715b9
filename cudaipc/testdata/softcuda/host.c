// Pinned host memory.
#include "softcuda.h"
#include <sys/mman.h>

enum { MAX_REGISTERED = 4096 };
static struct registered {
	uint64_t at, n;
	bool allocated;
} table[MAX_REGISTERED];
static int count;

bool host_pinned(uint64_t at, uint64_t n) {
	pthread_mutex_lock(&mine);
	bool ok = false;
	while (n) { // pieces that are registered side by side count as one
		int i = 0;
		while (i < count && !(at >= table[i].at && at - table[i].at < table[i].n))
			i++;
		ok = i < count;
		if (!ok)
			break;
		uint64_t here = table[i].at + table[i].n - at;
		at += here;
		n -= here < n ? here : n;
	}
	pthread_mutex_unlock(&mine);
	return ok;
}

static CUresult add(void *p, size_t n, bool allocated) {
	uint64_t at = (uintptr_t)p;
	CUresult r = CUDA_SUCCESS;
	pthread_mutex_lock(&mine);
	for (int i = 0; i < count; i++)
		if (at < table[i].at + table[i].n && table[i].at < at + n)
			r = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	if (!r && count == MAX_REGISTERED)
		r = CUDA_ERROR_OUT_OF_MEMORY;
	if (!r)
		table[count++] = (struct registered){at, n, allocated};
	pthread_mutex_unlock(&mine);
	if (!r)
		count_live(LIVE_REGISTERED_BYTES, (int64_t)n);
	return r;
}

static uint64_t drop(void *p, bool allocated) {
	uint64_t n = 0;
	stream_drain_all(false);
	pthread_mutex_lock(&mine);
	for (int i = 0; i < count && !n; i++)
		if (table[i].at == (uintptr_t)p && table[i].allocated == allocated) {
			n = table[i].n;
			table[i] = table[--count];
		}
	pthread_mutex_unlock(&mine);
	count_live(LIVE_REGISTERED_BYTES, -(int64_t)n);
	return n;
}

CUresult cuMemHostRegister(void *p, size_t n, unsigned int flags) {
	CONTEXT(c);
	unsigned char resident;
	if (!p || !n || flags & ~15u || mincore((void *)((uintptr_t)p & ~4095ull), 1, &resident))
		return CUDA_ERROR_INVALID_VALUE;
	return add(p, n, false);
}

CUresult cuMemHostUnregister(void *p) {
	CONTEXT(c);
	return drop(p, false) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemHostAlloc(void **p, size_t n, unsigned int flags) {
	CONTEXT(c);
	if (!n || flags & ~7u)
		return CUDA_ERROR_INVALID_VALUE;
	void *m = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (m == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult r = add(m, n, true);
	if (r)
		munmap(m, n);
	else
		*p = m;
	return r;
}

CUresult cuMemAllocHost(void **p, size_t n) { return cuMemHostAlloc(p, n, 0); }

CUresult cuMemFreeHost(void *p) {
	CONTEXT(c);
	uint64_t n = drop(p, true);
	if (n)
		munmap(p, n);
	return n ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *d, void *p, unsigned int flags) {
	CONTEXT(c);
	if (flags || !host_pinned((uintptr_t)p, 1))
		return CUDA_ERROR_INVALID_VALUE;
	*d = (uintptr_t)p;
	return 0;
}

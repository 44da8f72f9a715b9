// Virtual memory. A descriptor of an allocation is one of its file, whose name says which it is.
#include "softcuda.h"
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const size_t GRANULARITY = 2u << 20;
enum { MAX_HANDLES = 16384 };
static struct handle {
	int fd, entry, refs, device; // refs: the program's, and one for each mapping
	uint64_t uid;
	size_t size;
	bool released, exportable, imported;
} handles[MAX_HANDLES];
static int handle_count;

static int handle_add(struct handle h) { // mine held
	int i = 0;
	while (i < handle_count && handles[i].refs)
		i++;
	if (i == MAX_HANDLES)
		return -1;
	handle_count += i == handle_count;
	handles[i] = h;
	return i;
}

// handle_give makes h the program's, or releases its memory when there are too many.
static CUresult handle_give(CUmemGenericAllocationHandle *out, struct handle h) {
	pthread_mutex_lock(&mine);
	int i = handle_add(h);
	pthread_mutex_unlock(&mine);
	if (i < 0) {
		close(h.fd);
		backing_drop(h.entry);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*out = (CUmemGenericAllocationHandle)(i + 1);
	count_live(LIVE_VMM_HANDLES, 1);
	return CUDA_SUCCESS;
}

static struct handle *handle_of(CUmemGenericAllocationHandle h) { // mine held
	return h && h <= (uint64_t)handle_count && handles[h - 1].refs ? &handles[h - 1] : NULL;
}

static void handle_put(struct handle *h) { // mine held
	if (--h->refs)
		return;
	close(h->fd);
	bool shared = false; // imported twice: the hold is one
	for (int i = 0; i < handle_count; i++)
		shared |= handles[i].refs && handles[i].uid == h->uid;
	if (!shared)
		backing_drop(h->entry);
}

CUresult cuMemGetAllocationGranularity(size_t *g, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags o) {
	ENTER();
	(void)p;
	(void)o;
	*g = GRANULARITY;
	return 0;
}

CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t align, CUdeviceptr hint, unsigned long long flags) {
	CONTEXT(c);
	(void)hint;
	if (!n || n % GRANULARITY || flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&mine);
	*p = window_reserve(n, align);
	pthread_mutex_unlock(&mine);
	return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr p, size_t n) {
	CONTEXT(c);
	pthread_mutex_lock(&mine);
	bool ok = window_reserved(p) == n;
	for (size_t i = 0; ok && i < n; i += GRANULARITY)
		ok = !window_at(p + i);
	if (ok)
		window_release(p);
	pthread_mutex_unlock(&mine);
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t n, const CUmemAllocationProp *prop,
	unsigned long long flags) {
	CONTEXT(c);
	if (!n || n % GRANULARITY || flags || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || !device_ok(prop->location.id))
		return CUDA_ERROR_INVALID_VALUE;
	struct handle h = {.refs = 1, .size = n, .device = prop->location.id,
		.exportable = prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
	CUresult r = backing_create(n, h.device, &h.entry, &h.uid, &h.fd);
	return r ? r : handle_give(out, h);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle x) {
	CONTEXT(c);
	pthread_mutex_lock(&mine);
	struct handle *h = handle_of(x);
	bool ok = h && !h->released;
	if (ok) {
		h->released = true;
		handle_put(h);
	}
	pthread_mutex_unlock(&mine);
	if (ok)
		count_live(LIVE_VMM_HANDLES, -1);
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemMap(CUdeviceptr p, size_t n, size_t offset, CUmemGenericAllocationHandle x, unsigned long long flags) {
	CONTEXT(c);
	CUresult r = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&mine);
	struct handle *h = handle_of(x);
	if (h && h->imported && backing_orphaned(h->entry)) {
		r = CUDA_ERROR_NOT_SUPPORTED; // as on an H100 with driver 580
	} else if (h && !flags && !offset && n == h->size && window_has(p) && p % GRANULARITY == 0 && !window_at(p)) {
		segment s = {.va = p, .size = n, .kind = PIECE, .entry = h->entry, .uid = h->uid, .device = h->device,
			.handle = (int)x};
		r = window_map(s, h->fd) ? CUDA_ERROR_MAP_FAILED : CUDA_SUCCESS;
		h->refs += !r;
	}
	pthread_mutex_unlock(&mine);
	if (!r)
		count_live(LIVE_VMM_MAPS, 1);
	return r;
}

CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
	CONTEXT(c);
	stream_drain_all(false);
	CUresult r = CUDA_SUCCESS;
	pthread_mutex_lock(&mine);
	while (n && !r) {
		segment *s = window_at(p);
		if (!s || s->kind != PIECE || s->va != p || s->size > n) {
			r = CUDA_ERROR_INVALID_VALUE;
			break;
		}
		p += s->size;
		n -= s->size;
		int handle = s->handle;
		window_unmap(s->va);
		handle_put(&handles[handle - 1]);
		count_live(LIVE_VMM_MAPS, -1);
	}
	pthread_mutex_unlock(&mine);
	return r;
}

CUresult cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *a, size_t count) {
	CONTEXT(c);
	CUresult r = count == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&mine);
	while (n && !r) {
		segment *s = window_at(p);
		if (!s || s->va != p || s->size > n) {
			r = CUDA_ERROR_INVALID_VALUE;
			break;
		}
		s->access = a->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
		p += s->size;
		n -= s->size;
	}
	pthread_mutex_unlock(&mine);
	return r;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle x, CUmemAllocationHandleType type,
	unsigned long long flags) {
	CONTEXT(c);
	pthread_mutex_lock(&mine);
	struct handle *h = handle_of(x);
	bool may = h && h->exportable && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && !flags;
	int fd = may ? fcntl(h->fd, F_DUPFD_CLOEXEC, 0) : -1;
	pthread_mutex_unlock(&mine);
	if (fd < 0)
		return CUDA_ERROR_INVALID_VALUE;
	*(int *)out = fd;
	return 0;
}

// identify says which allocation a descriptor is of; the memory of a dead exporter is not opened.
static bool identify(int fd, struct handle *h) {
	char link[64], path[512];
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	ssize_t n = readlink(link, path, sizeof path - 1);
	if (n <= 0)
		return false;
	path[n] = 0;
	char *name = strrchr(path, '/');
	unsigned long long uid;
	if (!name || sscanf(name, "/a.%d.%llx", &h->entry, &uid) != 2 || h->entry < 0 || h->entry >= MAX_ALLOCATIONS)
		return false;
	machine_lock();
	machine_sweep();
	allocation *a = &machine->memory[h->entry];
	bool ok = a->uid == uid;
	if (ok) {
		held_set(a->held, self, 1);
		h->uid = uid;
		h->size = a->bytes;
		h->device = a->device;
	}
	machine_unlock();
	return ok;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *shareable,
	CUmemAllocationHandleType type) {
	CONTEXT(c);
	struct handle h = {.refs = 1, .imported = true};
	int fd = (int)(intptr_t)shareable;
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_INVALID_VALUE;
	if (!identify(fd, &h) || (h.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)) < 0)
		return CUDA_ERROR_INVALID_HANDLE;
	return handle_give(out, h);
}

// Memory of other processes.
#include "softcuda.h"
#include <string.h>
#include <unistd.h>

typedef struct {
	uint64_t magic, uid, size;
	int pid, entry;
	char rest[32];
} memory_handle;
_Static_assert(sizeof(memory_handle) == sizeof(CUipcMemHandle), "the handle of memory");
static const uint64_t MEMORY_MAGIC = 0x6d656d7564756331;

CUresult cuIpcGetMemHandle(CUipcMemHandle *h, CUdeviceptr p) {
	CONTEXT(c);
	pthread_mutex_lock(&mine);
	segment *s = window_at(p); // of the whole allocation, wherever p points in it
	memory_handle x = {.magic = MEMORY_MAGIC, .pid = getpid()};
	bool ok = s && s->kind == ALLOCATED;
	if (ok) {
		x.uid = s->uid;
		x.size = s->size;
		x.entry = s->entry;
	}
	pthread_mutex_unlock(&mine);
	if (!ok)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(h, &x, sizeof x);
	return 0;
}

// hold takes a hold on an allocation whose exporter lives.
static CUresult hold(const memory_handle *x, int device) {
	CUresult r = CUDA_ERROR_INVALID_HANDLE;
	machine_lock();
	machine_sweep();
	allocation *a = &machine->memory[x->entry];
	if (a->uid == x->uid && a->bytes == x->size && a->owner >= 0) {
		r = a->device == device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
		if (!r)
			held_set(a->held, self, 1);
	}
	machine_unlock();
	return r;
}

// open_first maps an allocation that this process has not open. mine held.
static CUresult open_first(CUdeviceptr *p, const memory_handle *x, int device) {
	segment s = {.size = x->size, .kind = IMPORTED, .entry = x->entry, .uid = x->uid, .device = device, .refs = 1,
		.access = true};
	CUresult r = hold(x, device);
	if (r)
		return r;
	int fd = backing_open(s.entry, s.uid);
	s.va = fd < 0 ? 0 : window_reserve(s.size, 0);
	if (s.va && window_map(s, fd) == 0)
		*p = s.va;
	else
		r = CUDA_ERROR_MAP_FAILED;
	if (r) {
		window_release(s.va);
		backing_drop(s.entry);
	}
	if (fd >= 0)
		close(fd);
	return r;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *p, CUipcMemHandle h, unsigned int flags) {
	CONTEXT(c);
	memory_handle x;
	memcpy(&x, &h, sizeof x);
	if (flags & ~1u || x.magic != MEMORY_MAGIC || x.entry < 0 || x.entry >= MAX_ALLOCATIONS)
		return CUDA_ERROR_INVALID_VALUE;
	if (x.pid == getpid())
		return CUDA_ERROR_INVALID_CONTEXT;
	CUresult r = CUDA_SUCCESS;
	pthread_mutex_lock(&mine);
	segment *s = window_find(IMPORTED, x.entry, x.uid);
	if (s) {
		s->refs++;
		*p = s->va;
	} else
		r = open_first(p, &x, c->device);
	pthread_mutex_unlock(&mine);
	if (!r)
		count_live(LIVE_IMPORTS, 1);
	open_pause();
	return r;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr p) {
	CONTEXT(c);
	stream_drain_all(false);
	pthread_mutex_lock(&mine);
	segment *s = window_at(p);
	bool ok = s && s->va == p && s->kind == IMPORTED;
	int entry = ok ? s->entry : -1;
	bool last = ok && --s->refs == 0;
	if (last) {
		window_unmap(p);
		window_release(p);
	}
	pthread_mutex_unlock(&mine);
	if (!ok)
		return CUDA_ERROR_INVALID_VALUE;
	if (last)
		backing_drop(entry);
	count_live(LIVE_IMPORTS, -1);
	return 0;
}

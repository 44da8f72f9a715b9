// Work of streams that is not a copy: filling, waiting for a word, writing one, host functions.
#include "softcuda.h"
#include <sched.h>
#include <string.h>
#include <time.h>

typedef struct {
	operation o;
	CUdeviceptr at;
	uint64_t value;
	size_t width, count;
	unsigned flags;
	CUhostFn fn;
	void *arg;
} value_op;

static char *reach(CUdeviceptr p, size_t n) {
	if (!window_has(p))
		return (char *)(uintptr_t)p;
	pthread_mutex_lock(&mine);
	char *at = window_covers(p, n) ? window_cpu(p) : NULL;
	pthread_mutex_unlock(&mine);
	if (!at)
		fault(CUDA_ERROR_ILLEGAL_ADDRESS);
	return at;
}

static void run_fill(operation *o) {
	value_op *v = (value_op *)o;
	char *p = reach(v->at, v->width * v->count);
	for (size_t i = 0; p && i < v->count; i++)
		memcpy(p + i * v->width, &v->value, v->width);
}

static uint64_t word(char *p, size_t width) {
	return width == 8 ? atomic_load((_Atomic uint64_t *)p) : atomic_load((_Atomic uint32_t *)p);
}

static bool reached(const value_op *v, uint64_t x) {
	uint64_t ahead = x - v->value;
	switch (v->flags & 3) {
	case CU_STREAM_WAIT_VALUE_GEQ: return v->width == 8 ? (int64_t)ahead >= 0 : (int32_t)ahead >= 0;
	case CU_STREAM_WAIT_VALUE_EQ: return x == v->value;
	case CU_STREAM_WAIT_VALUE_AND: return (x & v->value) != 0;
	default: return v->width == 8 ? ~(x | v->value) != 0 : (uint32_t) ~(x | v->value) != 0;
	}
}

// A write of the word wakes no waiter, so the word is polled: first often, then every 50 us.
static void run_wait(operation *o) {
	value_op *v = (value_op *)o;
	char *p = reach(v->at, v->width);
	for (int i = 0; p && !sticky && !reached(v, word(p, v->width)); i++) {
		struct timespec t = {0, 50000};
		if (i < 200)
			sched_yield();
		else
			nanosleep(&t, NULL);
	}
}

static void run_write(operation *o) {
	value_op *v = (value_op *)o;
	char *p = reach(v->at, v->width);
	if (p && v->width == 8)
		atomic_store((_Atomic uint64_t *)p, v->value);
	else if (p)
		atomic_store((_Atomic uint32_t *)p, (uint32_t)v->value);
}

static void run_host(operation *o) {
	value_op *v = (value_op *)o;
	v->fn(v->arg);
}

static CUresult submit(CUstream s, value_op v) {
	size_t n = v.width * v.count;
	pthread_mutex_lock(&mine);
	bool ok = !n || !window_has(v.at) || window_covers(v.at, n);
	pthread_mutex_unlock(&mine);
	if (!ok || (n && !window_has(v.at) && !host_pinned(v.at, n)) || (v.width && v.at % v.width))
		return CUDA_ERROR_INVALID_VALUE;
	value_op *p = malloc(sizeof *p);
	if (!p)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*p = v;
	return stream_submit(s, &p->o);
}

#define FILL(w) (value_op){.o.run = run_fill, .at = d, .value = v, .width = w, .count = n}
CUresult cuMemsetD8(CUdeviceptr d, unsigned char v, size_t n) { CONTEXT(c); return submit(NULL, FILL(1)); }
CUresult cuMemsetD16(CUdeviceptr d, unsigned short v, size_t n) { CONTEXT(c); return submit(NULL, FILL(2)); }
CUresult cuMemsetD32(CUdeviceptr d, unsigned int v, size_t n) { CONTEXT(c); return submit(NULL, FILL(4)); }
CUresult cuMemsetD8Async(CUdeviceptr d, unsigned char v, size_t n, CUstream s) {
	CONTEXT(c);
	return submit(s, FILL(1));
}
CUresult cuMemsetD16Async(CUdeviceptr d, unsigned short v, size_t n, CUstream s) {
	CONTEXT(c);
	return submit(s, FILL(2));
}
CUresult cuMemsetD32Async(CUdeviceptr d, unsigned int v, size_t n, CUstream s) {
	CONTEXT(c);
	return submit(s, FILL(4));
}

#define WORD(r, w) (value_op){.o.run = r, .at = at, .value = v, .width = w, .count = 1, .flags = f}
CUresult cuStreamWaitValue32(CUstream s, CUdeviceptr at, cuuint32_t v, unsigned int f) {
	CONTEXT(c);
	return submit(s, WORD(run_wait, 4));
}
CUresult cuStreamWaitValue64(CUstream s, CUdeviceptr at, cuuint64_t v, unsigned int f) {
	CONTEXT(c);
	return submit(s, WORD(run_wait, 8));
}
CUresult cuStreamWriteValue32(CUstream s, CUdeviceptr at, cuuint32_t v, unsigned int f) {
	CONTEXT(c);
	return submit(s, WORD(run_write, 4));
}
CUresult cuStreamWriteValue64(CUstream s, CUdeviceptr at, cuuint64_t v, unsigned int f) {
	CONTEXT(c);
	return submit(s, WORD(run_write, 8));
}

CUresult cuLaunchHostFunc(CUstream s, CUhostFn fn, void *arg) {
	CONTEXT(c);
	return fn ? submit(s, (value_op){.o.run = run_host, .fn = fn, .arg = arg}) : CUDA_ERROR_INVALID_VALUE;
}

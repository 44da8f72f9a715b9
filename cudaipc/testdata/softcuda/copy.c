// Copies: one by one, rows, and batches.
#include "softcuda.h"
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct {
	CUdeviceptr dst, src;
	size_t width, rows, dst_pitch, src_pitch;
} rect;

typedef struct {
	operation o;
	size_t n;
	rect r[];
} copies;

enum { ANY, HOST, DEVICE };

static size_t extent(const rect *r, size_t pitch) { return r->rows ? (r->rows - 1) * pitch + r->width : 0; }

// An address of the window must be mapped, in every call; one that is said to be of the device may
// also be pinned host memory.
static bool valid(CUdeviceptr p, size_t n, int side) {
	if (!n)
		return true;
	if (window_has(p)) {
		pthread_mutex_lock(&mine);
		bool ok = window_covers(p, n);
		pthread_mutex_unlock(&mine);
		return ok;
	}
	return side == DEVICE ? host_pinned(p, n) : p != 0;
}

static char *reach(CUdeviceptr p, size_t n) {
	if (!window_has(p))
		return (char *)(uintptr_t)p;
	pthread_mutex_lock(&mine);
	bool ok = window_covers(p, n);
	pthread_mutex_unlock(&mine);
	return ok ? window_cpu(p) : NULL;
}

static void pause_us(uint64_t us) {
	struct timespec t = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
	nanosleep(&t, NULL);
}

void copy_pause(void) {
	const char *slow = getenv("SOFTCUDA_COPY_US");
	if (slow)
		pause_us(strtoull(slow, NULL, 10));
	for (const char *held = getenv("SOFTCUDA_COPY_HELD"); held && access(held, F_OK) == 0;)
		pause_us(500);
}

void open_pause(void) {
	for (const char *held = getenv("SOFTCUDA_OPEN_HELD"); held && access(held, F_OK) == 0;)
		pause_us(500);
}

bool copy_ends(CUdeviceptr p) {
	const char *ending = getenv("SOFTCUDA_COPIES_ON_DEATH");
	if (!ending || strcmp(ending, "end") || !window_has(p))
		return false;
	pthread_mutex_lock(&mine);
	segment *s = window_at(p);
	int entry = s && s->kind != ALLOCATED ? s->entry : -1;
	pthread_mutex_unlock(&mine);
	return entry >= 0 && backing_orphaned(entry);
}

static void run_one(const rect *r) {
	if (!r->width || !r->rows || copy_ends(r->dst) || copy_ends(r->src))
		return;
	char *d = reach(r->dst, extent(r, r->dst_pitch)), *s = reach(r->src, extent(r, r->src_pitch));
	if (!d || !s) {
		fault(CUDA_ERROR_ILLEGAL_ADDRESS);
		return;
	}
	for (size_t i = 0; i < r->rows; i++)
		memmove(d + i * r->dst_pitch, s + i * r->src_pitch, r->width);
	count_total(TOTAL_COPIES, 1);
	count_total(TOTAL_BYTES, r->width * r->rows);
}

static void run(operation *o) {
	copies *c = (copies *)o;
	copy_pause();
	for (size_t i = 0; i < c->n && !sticky; i++)
		run_one(&c->r[i]);
}

static copies *make(size_t n) {
	copies *c = malloc(sizeof *c + n * sizeof(rect));
	if (c)
		*c = (copies){.o.run = run, .n = n};
	return c;
}

static bool pageable(CUdeviceptr p, size_t n) { return n && !window_has(p) && !host_pinned(p, n); }

static CUresult submit(rect r, int to, int from, CUstream s, bool async) {
	size_t nd = extent(&r, r.dst_pitch), ns = extent(&r, r.src_pitch);
	if (!valid(r.dst, nd, to) || !valid(r.src, ns, from))
		return CUDA_ERROR_INVALID_VALUE;
	copies *c = make(1);
	if (!c)
		return CUDA_ERROR_OUT_OF_MEMORY;
	c->r[0] = r;
	c->o.bytes = r.width * r.rows;
	bool staged = async && (pageable(r.dst, nd) || pageable(r.src, ns));
	CUresult e = stream_submit(async ? s : NULL, &c->o);
	if (!e && staged) { // memory that is not pinned makes an asynchronous copy a synchronous one
		count_total(TOTAL_PAGEABLE_ASYNC, 1);
		e = stream_drain(s);
	}
	return e;
}

static rect line(CUdeviceptr d, CUdeviceptr s, size_t n) { return (rect){d, s, n, 1, n, n}; }
#define AT(p) ((CUdeviceptr)(uintptr_t)(p))

CUresult cuMemcpy(CUdeviceptr d, CUdeviceptr s, size_t n) {
	CONTEXT(c);
	return submit(line(d, s, n), ANY, ANY, NULL, false);
}
CUresult cuMemcpyAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream t) {
	CONTEXT(c);
	return submit(line(d, s, n), ANY, ANY, t, true);
}
CUresult cuMemcpyHtoD(CUdeviceptr d, const void *s, size_t n) {
	CONTEXT(c);
	return submit(line(d, AT(s), n), DEVICE, HOST, NULL, false);
}
CUresult cuMemcpyDtoH(void *d, CUdeviceptr s, size_t n) {
	CONTEXT(c);
	return submit(line(AT(d), s, n), HOST, DEVICE, NULL, false);
}
CUresult cuMemcpyDtoD(CUdeviceptr d, CUdeviceptr s, size_t n) {
	CONTEXT(c);
	return submit(line(d, s, n), DEVICE, DEVICE, NULL, false);
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr d, const void *s, size_t n, CUstream t) {
	CONTEXT(c);
	return submit(line(d, AT(s), n), DEVICE, HOST, t, true);
}
CUresult cuMemcpyDtoHAsync(void *d, CUdeviceptr s, size_t n, CUstream t) {
	CONTEXT(c);
	return submit(line(AT(d), s, n), HOST, DEVICE, t, true);
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream t) {
	CONTEXT(c);
	return submit(line(d, s, n), DEVICE, DEVICE, t, true);
}

static CUresult submit_2d(const CUDA_MEMCPY2D *m, CUstream s, bool async) {
	if (m->srcMemoryType == CU_MEMORYTYPE_ARRAY || m->dstMemoryType == CU_MEMORYTYPE_ARRAY)
		return CUDA_ERROR_NOT_SUPPORTED;
	if ((m->Height > 1 && (m->srcPitch < m->WidthInBytes || m->dstPitch < m->WidthInBytes)))
		return CUDA_ERROR_INVALID_VALUE;
	bool src_host = m->srcMemoryType == CU_MEMORYTYPE_HOST, dst_host = m->dstMemoryType == CU_MEMORYTYPE_HOST;
	rect r = {.width = m->WidthInBytes, .rows = m->Height, .dst_pitch = m->dstPitch, .src_pitch = m->srcPitch};
	r.src = (src_host ? AT(m->srcHost) : m->srcDevice) + m->srcY * m->srcPitch + m->srcXInBytes;
	r.dst = (dst_host ? AT(m->dstHost) : m->dstDevice) + m->dstY * m->dstPitch + m->dstXInBytes;
	return submit(r, dst_host ? HOST : DEVICE, src_host ? HOST : DEVICE, s, async);
}

CUresult cuMemcpy2D(const CUDA_MEMCPY2D *m) { CONTEXT(c); return submit_2d(m, NULL, false); }
CUresult cuMemcpy2DUnaligned(const CUDA_MEMCPY2D *m) { CONTEXT(c); return submit_2d(m, NULL, false); }
CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *m, CUstream s) { CONTEXT(c); return submit_2d(m, s, true); }

static CUresult batch(CUdeviceptr *d, CUdeviceptr *s, size_t *n, size_t count, CUmemcpyAttributes *a, size_t *at,
	size_t attributes, size_t *failed, CUstream t) {
	*failed = SIZE_MAX;
	if (!count || !a || !at || !attributes || attributes > count || at[0] != 0 || !t || t == CU_STREAM_LEGACY)
		return CUDA_ERROR_INVALID_VALUE;
	copies *c = make(count);
	if (!c)
		return CUDA_ERROR_OUT_OF_MEMORY;
	bool staged = false;
	for (size_t i = 0; i < count; i++) {
		if (!n[i] || !valid(d[i], n[i], ANY) || !valid(s[i], n[i], ANY)) {
			free(c);
			*failed = i;
			return CUDA_ERROR_INVALID_VALUE;
		}
		staged |= pageable(d[i], n[i]) || pageable(s[i], n[i]);
		c->r[i] = line(d[i], s[i], n[i]);
		c->o.bytes += n[i];
	}
	count_total(TOTAL_BATCH_CALLS, 1);
	CUresult r = stream_submit(t, &c->o);
	if (r || !staged)
		return r;
	count_total(TOTAL_PAGEABLE_ASYNC, 1);
	return stream_drain(t);
}

static CUresult cuMemcpyBatchAsync(CUdeviceptr *d, CUdeviceptr *s, size_t *n, size_t count, CUmemcpyAttributes *a,
	size_t *at, size_t attributes, size_t *failed, CUstream t) {
	CONTEXT(c);
	return batch(d, s, n, count, a, at, attributes, failed, t);
}

static CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *d, CUdeviceptr *s, size_t *n, size_t count, CUmemcpyAttributes *a,
	size_t *at, size_t attributes, CUstream t) {
	CONTEXT(c);
	size_t failed;
	return batch(d, s, n, count, a, at, attributes, &failed, t);
}

// cuGetProcAddress knows the batch call alone: the rest is linked by name.
CUresult cuGetProcAddress(const char *symbol, void **fn, int version, cuuint64_t flags,
	CUdriverProcAddressQueryResult *status) {
	ENTER();
	(void)flags;
	CUdriverProcAddressQueryResult s = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	*fn = NULL;
	if (!strcmp(symbol, "cuMemcpyBatchAsync") && !getenv("SOFTCUDA_NO_BATCH") && driver_version >= 12080) {
		s = version < 12080 || version > driver_version ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
			: CU_GET_PROC_ADDRESS_SUCCESS;
		if (s == CU_GET_PROC_ADDRESS_SUCCESS)
			*fn = version >= 13000 ? (void *)(uintptr_t)cuMemcpyBatchAsync_v2 : (void *)(uintptr_t)cuMemcpyBatchAsync;
	}
	if (status)
		*status = s;
	return *fn ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

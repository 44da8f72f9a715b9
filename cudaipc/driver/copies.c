//go:build cuda

#include "copies.h"
#include "shim.h"

CUresult kvdrv_copy_each(const uint64_t *dst, const uint64_t *src, const size_t *len, size_t n, int to_host, CUstream s,
	size_t *started) {
	for (*started = 0; *started < n; ++*started) {
		size_t i = *started;
		CUresult r = to_host ? cuMemcpyDtoHAsync((void *)(uintptr_t)dst[i], (CUdeviceptr)src[i], len[i], s)
		                     : cuMemcpyHtoDAsync((CUdeviceptr)dst[i], (const void *)(uintptr_t)src[i], len[i], s);
		if (r != CUDA_SUCCESS)
			return r;
	}
	return CUDA_SUCCESS;
}

CUresult kvdrv_copy_rects(const kvdrv_rect *list, size_t n, int to_host, CUstream s, size_t *started) {
	for (*started = 0; *started < n; ++*started) {
		const kvdrv_rect *r = &list[*started];
		CUDA_MEMCPY2D c = {0};
		c.WidthInBytes = r->width;
		c.Height = r->rows;
		c.dstPitch = r->dst_pitch;
		c.srcPitch = r->src_pitch;
		if (to_host) {
			c.srcMemoryType = CU_MEMORYTYPE_DEVICE;
			c.srcDevice = (CUdeviceptr)r->src;
			c.dstMemoryType = CU_MEMORYTYPE_HOST;
			c.dstHost = (void *)(uintptr_t)r->dst;
		} else {
			c.srcMemoryType = CU_MEMORYTYPE_HOST;
			c.srcHost = (const void *)(uintptr_t)r->src;
			c.dstMemoryType = CU_MEMORYTYPE_DEVICE;
			c.dstDevice = (CUdeviceptr)r->dst;
		}
		CUresult e = cuMemcpy2DAsync(&c, s);
		if (e != CUDA_SUCCESS)
			return e;
	}
	return CUDA_SUCCESS;
}

// cuMemcpyBatchAsync came with CUDA 12.8 and lost its index of the failed copy with 13.0. The types
// are written out here so that the same source is compiled against any header; this is their layout
// in the driver's reference.
typedef struct {
	int type, id;
} batch_location;
typedef struct {
	int access_order; // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: the sources are read when the stream gets there
	batch_location src, dst;
	unsigned flags; // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: by copy engines, not by the engine's multiprocessors
} batch_attributes;
_Static_assert(sizeof(batch_attributes) == 24, "CUmemcpyAttributes has 24 bytes");
enum { ACCESS_ORDER_STREAM = 1, PREFER_OVERLAP_WITH_COMPUTE = 1 };

typedef CUresult batch_12(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, batch_attributes *, size_t *, size_t,
	size_t *, CUstream);
typedef CUresult batch_13(const CUdeviceptr *, const CUdeviceptr *, const size_t *, size_t, batch_attributes *,
	size_t *, size_t, CUstream);
typedef CUresult get_proc_address(const char *, void **, int, uint64_t, int *);

static batch_12 *twelve;
static batch_13 *thirteen;

CUresult kvdrv_find_batch(int version) {
	get_proc_address *get = (get_proc_address *)kvdrv_symbol("cuGetProcAddress_v2");
	void *found = NULL;
	int status = 0;
	// The version asked for decides the signature: never the driver's own, which may be newer than
	// both.
	int ask = version >= 13000 ? 13000 : 12080;
	if (!get || version < 12080 || get("cuMemcpyBatchAsync", &found, ask, 0, &status) != CUDA_SUCCESS || !found)
		return CUDA_ERROR_NOT_FOUND;
	if (ask == 13000)
		thirteen = (batch_13 *)found;
	else
		twelve = (batch_12 *)found;
	return CUDA_SUCCESS;
}

CUresult kvdrv_copy_batch(uint64_t *dst, uint64_t *src, size_t *len, size_t n, CUstream s) {
	_Static_assert(sizeof(CUdeviceptr) == sizeof(uint64_t), "addresses have 8 bytes");
	batch_attributes a = {0};
	size_t first = 0, failed = 0;
	a.access_order = ACCESS_ORDER_STREAM;
	a.flags = PREFER_OVERLAP_WITH_COMPUTE;
	if (thirteen)
		return thirteen((CUdeviceptr *)dst, (CUdeviceptr *)src, len, n, &a, &first, 1, s);
	if (twelve)
		return twelve((CUdeviceptr *)dst, (CUdeviceptr *)src, len, n, &a, &first, 1, &failed, s);
	return CUDA_ERROR_NOT_FOUND;
}

// The calls of which there are many per job: one call from Go does all of them.
#pragma once
#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

// kvdrv_copy_each starts n copies one by one and stops at the first that fails; *started are those
// before it.
CUresult kvdrv_copy_each(const uint64_t *dst, const uint64_t *src, const size_t *len, size_t n, int to_host, CUstream s,
	size_t *started);

// kvdrv_rect is rows of one length at constant distances on both sides, bytes.
typedef struct {
	uint64_t dst, src;
	size_t width, rows, dst_pitch, src_pitch;
} kvdrv_rect;
CUresult kvdrv_copy_rects(const kvdrv_rect *r, size_t n, int to_host, CUstream s, size_t *started);

// kvdrv_find_batch looks for the batch call: 0, or NOT_FOUND where the driver has none. Called
// once.
CUresult kvdrv_find_batch(int driver_version);
CUresult kvdrv_copy_batch(uint64_t *dst, uint64_t *src, size_t *len, size_t n, CUstream s);

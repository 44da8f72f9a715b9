// Device addresses: a window that faults when the CPU touches it, and at the same offsets a second
// one for the double itself.
#include "softcuda.h"
#include <string.h>
#include <sys/mman.h>

static const uint64_t WINDOW_BYTES = 1ull << 38; // address space only
static const uint64_t GRAIN = 2ull << 20;
enum { MAX_SEGMENTS = 65536 };

typedef struct {
	CUdeviceptr va;
	uint64_t size;
} range;
static CUdeviceptr base;
static char *cpu_base;
static range ranges[MAX_SEGMENTS];     // by address
static segment segments[MAX_SEGMENTS]; // by address
static int range_count, segment_count;

int window_open(void) {
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
	char *p = mmap(NULL, WINDOW_BYTES, PROT_NONE, flags, -1, 0);
	char *q = mmap(NULL, WINDOW_BYTES, PROT_NONE, flags, -1, 0);
	if (p == MAP_FAILED || q == MAP_FAILED)
		return -1;
	base = ((uintptr_t)p + GRAIN - 1) & ~(GRAIN - 1);
	cpu_base = q;
	return 0;
}

bool window_has(CUdeviceptr p) { return base && p >= base && p < base + WINDOW_BYTES - GRAIN; }
void *window_cpu(CUdeviceptr p) { return cpu_base + (p - base); }

CUdeviceptr window_reserve(uint64_t size, uint64_t align) {
	if (align < GRAIN)
		align = GRAIN;
	size = (size + GRAIN - 1) & ~(GRAIN - 1);
	CUdeviceptr at = base;
	int i = 0;
	for (;; i++) { // the first hole; one grain between ranges, so that running over an end is seen
		at = (at + align - 1) / align * align;
		if (i == range_count || at + size + GRAIN <= ranges[i].va)
			break;
		at = ranges[i].va + ranges[i].size + GRAIN;
	}
	if (range_count == MAX_SEGMENTS || at + size + 2 * GRAIN > base + WINDOW_BYTES)
		return 0;
	memmove(&ranges[i + 1], &ranges[i], (size_t)(range_count - i) * sizeof *ranges);
	ranges[i] = (range){at, size};
	range_count++;
	return at;
}

static int range_index(CUdeviceptr p) {
	for (int i = 0; i < range_count; i++)
		if (ranges[i].va == p)
			return i;
	return -1;
}

uint64_t window_reserved(CUdeviceptr p) {
	int i = range_index(p);
	return i < 0 ? 0 : ranges[i].size;
}

void window_release(CUdeviceptr p) {
	int i = range_index(p);
	if (i < 0)
		return;
	range_count--;
	memmove(&ranges[i], &ranges[i + 1], (size_t)(range_count - i) * sizeof *ranges);
}

// after is the index of the first segment that begins after p.
static int after(CUdeviceptr p) {
	int low = 0, high = segment_count;
	while (low < high) {
		int mid = (low + high) / 2;
		if (segments[mid].va <= p)
			low = mid + 1;
		else
			high = mid;
	}
	return low;
}

segment *window_at(CUdeviceptr p) {
	int i = after(p);
	return i && p - segments[i - 1].va < segments[i - 1].size ? &segments[i - 1] : NULL;
}

segment *window_find(int kind, int entry, uint64_t uid) {
	for (int i = 0; i < segment_count; i++)
		if (segments[i].kind == kind && segments[i].entry == entry && segments[i].uid == uid)
			return &segments[i];
	return NULL;
}

int window_map(segment s, int fd) {
	if (segment_count == MAX_SEGMENTS)
		return -1;
	if (mmap(window_cpu(s.va), s.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
		return -1;
	int i = after(s.va);
	memmove(&segments[i + 1], &segments[i], (size_t)(segment_count - i) * sizeof s);
	segments[i] = s;
	segment_count++;
	return 0;
}

void window_unmap(CUdeviceptr p) {
	segment *s = window_at(p);
	if (!s)
		return;
	mmap(window_cpu(s->va), s->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
	int i = (int)(s - segments);
	segment_count--;
	memmove(s, s + 1, (size_t)(segment_count - i) * sizeof *s);
}

bool window_covers(CUdeviceptr p, uint64_t n) {
	while (n) {
		segment *s = window_at(p);
		if (!s || !s->access)
			return false;
		uint64_t here = s->va + s->size - p;
		if (here >= n)
			return true;
		p += here;
		n -= here;
	}
	return true;
}

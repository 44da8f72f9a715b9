// Modules: a text is recognised by the name of its function, which is implemented here once more.
#include "softcuda.h"
#include <stdio.h>
#include <string.h>

struct CUmod_st {
	bool loaded;
};
struct CUfunc_st {
	CUmodule module;
};
static struct CUmod_st module; // the one that can be loaded, however often
static struct CUfunc_st copy_list = {&module};
static int loads;

static const char NAME[] = "kvagent_copy"; // (list u64, count u32): cudaipc/kernel

// cuModuleLoadData takes PTX text, as the driver does; the compiler is not here.
CUresult cuModuleLoadData(CUmodule *m, const void *image) {
	CONTEXT(c);
	const char *text = image;
	if (!text || !strstr(text, ".version ") || !strstr(text, ".target ") || !strstr(text, ".address_size 64"))
		return CUDA_ERROR_INVALID_IMAGE;
	char entry[64];
	snprintf(entry, sizeof entry, ".visible .entry %s(", NAME);
	if (!strstr(text, entry))
		return CUDA_ERROR_INVALID_PTX;
	pthread_mutex_lock(&mine);
	module.loaded = true;
	loads++;
	pthread_mutex_unlock(&mine);
	count_live(LIVE_MODULES, 1);
	*m = &module;
	return 0;
}

CUresult cuModuleUnload(CUmodule m) {
	CONTEXT(c);
	stream_drain_all(false);
	pthread_mutex_lock(&mine);
	bool ok = m == &module && module.loaded;
	if (ok)
		module.loaded = --loads > 0;
	pthread_mutex_unlock(&mine);
	if (ok)
		count_live(LIVE_MODULES, -1);
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
	CONTEXT(c);
	if (m != &module || !module.loaded)
		return CUDA_ERROR_INVALID_HANDLE;
	if (strcmp(name, NAME))
		return CUDA_ERROR_NOT_FOUND;
	*f = &copy_list;
	return 0;
}

typedef struct {
	operation o;
	CUdeviceptr list;
	uint32_t count;
} launch;

typedef struct {
	uint64_t dst, src, n;
} entry;

// reach is where the double has bytes that a kernel may touch: mapped in the window, or pinned.
static char *reach(uint64_t p, uint64_t n) {
	if (!window_has(p))
		return host_pinned(p, n) ? (char *)(uintptr_t)p : NULL;
	pthread_mutex_lock(&mine);
	char *at = window_covers(p, n) ? window_cpu(p) : NULL;
	pthread_mutex_unlock(&mine);
	return at;
}

// run reads the list when the stream gets there, not when it was launched. An address that a kernel
// may not touch ends the context.
static void run(operation *o) {
	launch *l = (launch *)o;
	copy_pause();
	entry *list = (entry *)reach(l->list, l->count * sizeof *list);
	if (l->count && !list)
		fault(CUDA_ERROR_ILLEGAL_ADDRESS);
	for (uint32_t i = 0; i < l->count && !sticky; i++) {
		char *d = reach(list[i].dst, list[i].n), *s = reach(list[i].src, list[i].n);
		if (list[i].n && (!d || !s))
			fault(CUDA_ERROR_ILLEGAL_ADDRESS);
		else if (list[i].n && !copy_ends(list[i].dst) && !copy_ends(list[i].src))
			memcpy(d, s, list[i].n);
		count_total(TOTAL_KERNEL_COPIES, 1);
	}
}

CUresult cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
	unsigned int by, unsigned int bz, unsigned int shared, CUstream s, void **params, void **extra) {
	CONTEXT(c);
	(void)shared;
	if (f != &copy_list || !module.loaded)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!gx || gy != 1 || gz != 1 || !bx || bx > 1024 || bx % 32 || by != 1 || bz != 1 || !params || extra)
		return CUDA_ERROR_INVALID_VALUE;
	launch *l = malloc(sizeof *l);
	if (!l)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*l = (launch){.o.run = run};
	memcpy(&l->list, params[0], sizeof l->list);
	memcpy(&l->count, params[1], sizeof l->count);
	if (l->list % _Alignof(entry)) {
		free(l);
		return fault(CUDA_ERROR_MISALIGNED_ADDRESS);
	}
	return stream_submit(s, &l->o);
}

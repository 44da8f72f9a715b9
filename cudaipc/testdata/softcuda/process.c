// The process's side: initialisation, the knobs that make calls fail or hang, sticky errors,
// counters.
#include "softcuda.h"
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

_Atomic int sticky;
int self = -1, device_count = 1, first_device, driver_version = 12080;
uint64_t device_bytes = 8ull << 30, context_bytes;
pthread_mutex_t mine = PTHREAD_MUTEX_INITIALIZER;
static int initialized_by; // pid: a forked child has no driver

enum { MAX_KNOBS = 16 };
static struct knob {
	char call[64];
	int nth, code; // nth call fails; 0: every one. code -1: it hangs
} knobs[MAX_KNOBS];
static int knob_count = -1;

static void knobs_read(const char *name, bool hang) {
	const char *e = getenv(name);
	while (e && *e && knob_count < MAX_KNOBS) {
		struct knob k = {.code = -1};
		if (sscanf(e, hang ? "%63[^:]:%d" : "%63[^:]:%d:%d", k.call, &k.nth, &k.code) >= (hang ? 2 : 3))
			knobs[knob_count++] = k;
		e = strchr(e, ',');
		e = e ? e + 1 : NULL;
	}
}

static bool is_sticky(int code) {
	return code == 214 || (code >= 700 && code <= 702) || (code >= 710 && code <= 720 && code != 712 && code != 713) ||
		code == 999;
}

CUresult fault(int code) {
	int none = 0;
	atomic_compare_exchange_strong(&sticky, &none, code);
	return code;
}

static int knob_hit(const char *call) {
	size_t plain = strlen(call); // "cuMemAlloc" means cuMemAlloc_v2 too
	if (plain > 3 && call[plain - 3] == '_' && call[plain - 2] == 'v')
		plain -= 3;
	int code = 0;
	pthread_mutex_lock(&mine);
	if (knob_count < 0) {
		knob_count = 0;
		knobs_read("SOFTCUDA_FAIL", false);
		knobs_read("SOFTCUDA_HANG", true);
	}
	for (int i = 0; i < knob_count; i++) {
		struct knob *k = &knobs[i];
		bool same = !strcmp(k->call, call) || (strlen(k->call) == plain && !strncmp(k->call, call, plain));
		if (same && (k->nth == 0 || (k->nth > 0 && --k->nth == 0 && (k->nth = -1))))
			code = k->code;
	}
	pthread_mutex_unlock(&mine);
	return code;
}

// note_call writes the name of each call, a line, at the end of the file that SOFTCUDA_CALLS names.
static void note_call(const char *call) {
	const char *path = getenv("SOFTCUDA_CALLS");
	if (!path || !*path)
		return;
	char line[80];
	int n = snprintf(line, sizeof line, "%s\n", call), fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
	if (fd < 0)
		return;
	if (write(fd, line, (size_t)n) != n)
		fprintf(stderr, "softcuda: SOFTCUDA_CALLS=%s: a call is not noted\n", path);
	close(fd);
}

static CUresult knob_apply(const char *call) {
	note_call(call);
	int code = knob_hit(call);
	while (code < 0)
		pause();
	return is_sticky(code) ? fault(code) : (CUresult)code;
}

CUresult enter(const char *call) {
	if (initialized_by != getpid())
		return CUDA_ERROR_NOT_INITIALIZED;
	CUresult r = knob_apply(call);
	return r ? r : (CUresult)sticky;
}

CUresult enter_context(const char *call, CUcontext *c) {
	CUresult r = enter(call);
	*c = context_current();
	if (!r && (!*c || (*c)->refs <= 0))
		return CUDA_ERROR_INVALID_CONTEXT;
	return r;
}

void count_live(int what, int64_t by) { atomic_fetch_add(&machine->process[self].live[what], by); }
void count_total(int what, uint64_t by) { atomic_fetch_add(&machine->total[what], by); }

static uint64_t setting(const char *name, uint64_t standard) {
	const char *e = getenv(name);
	return e && *e ? strtoull(e, NULL, 0) : standard;
}

static CUresult start(void) {
	device_count = (int)setting("SOFTCUDA_DEVICES", 1);
	if (device_count <= 0)
		return CUDA_ERROR_NO_DEVICE;
	first_device = (int)setting("SOFTCUDA_FIRST_DEVICE", 0);
	if (first_device < 0 || first_device >= MAX_DEVICES)
		return CUDA_ERROR_NO_DEVICE;
	if (device_count > MAX_DEVICES - first_device)
		device_count = MAX_DEVICES - first_device;
	device_bytes = setting("SOFTCUDA_MEMORY", 8ull << 30);
	context_bytes = setting("SOFTCUDA_CONTEXT_BYTES", 0);
	driver_version = (int)setting("SOFTCUDA_DRIVER_VERSION", 12080);
	if (machine_open() || (self = machine_join()) < 0 || window_open())
		return CUDA_ERROR_OPERATING_SYSTEM;
	initialized_by = getpid();
	return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags) {
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = knob_apply(__func__);
	if (r)
		return r;
	static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
	pthread_mutex_lock(&once);
	if (!initialized_by)
		r = start();
	else if (initialized_by != getpid())
		r = CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_unlock(&once);
	return r;
}

CUresult cuDriverGetVersion(int *version) {
	*version = (int)setting("SOFTCUDA_DRIVER_VERSION", 12080);
	return CUDA_SUCCESS;
}

// Threads of streams may still run while the process ends: its holdings are returned as if it had
// been killed.
__attribute__((destructor)) static void leave(void) {
	if (initialized_by == getpid())
		machine_leave(self);
}

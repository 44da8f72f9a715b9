// Events. An interprocess one lies in the machine's table; waiters wait for its
// fired count by futex.
#include "softcuda.h"
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct CUevent_st {
	unsigned flags;
	int entry; // in the machine's table, or -1
	bool imported;
	_Atomic int refs; // the program's one, and one for each operation in flight
	_Atomic int64_t ns;
	shared_event *s, own;
};

typedef struct {
	operation o;
	CUevent e;
	uint64_t n;
} event_op;

typedef struct {
	uint64_t magic, uid;
	int pid, entry;
	char rest[40];
} event_handle;
_Static_assert(sizeof(event_handle) == sizeof(CUipcEventHandle), "the handle of an event");
static const uint64_t EVENT_MAGIC = 0x746e657675647563;

static void put(CUevent e) {
	if (atomic_fetch_sub(&e->refs, 1) > 1)
		return;
	if (e->entry >= 0) {
		machine_lock();
		held_set(e->s->held, self, 0);
		if (!held_any(e->s->held))
			e->s->uid = 0;
		machine_unlock();
	}
	free(e);
}

static CUresult submit(CUstream s, CUevent e, uint64_t n, void (*run)(operation *), void (*skip)(operation *)) {
	event_op *o = malloc(sizeof *o);
	if (!o)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*o = (event_op){.o = {.run = run, .skip = skip}, .e = e, .n = n};
	atomic_fetch_add(&e->refs, 1);
	CUresult r = stream_submit(s, &o->o);
	if (r == CUDA_ERROR_INVALID_HANDLE)
		put(e);
	return r;
}

CUresult cuEventCreate(CUevent *out, unsigned int flags) {
	CONTEXT(c);
	bool shared = flags & CU_EVENT_INTERPROCESS;
	if (flags & ~7u || (shared && !(flags & CU_EVENT_DISABLE_TIMING)))
		return CUDA_ERROR_INVALID_VALUE;
	CUevent e = calloc(1, sizeof *e);
	if (!e)
		return CUDA_ERROR_OUT_OF_MEMORY;
	e->flags = flags;
	e->entry = -1;
	e->refs = 1;
	e->s = &e->own;
	machine_lock();
	for (int i = 0; shared && e->entry < 0 && i < MAX_EVENTS; i++)
		if (!machine->event[i].uid)
			e->entry = i;
	if (e->entry >= 0) {
		e->s = &machine->event[e->entry];
		memset(e->s, 0, sizeof *e->s);
		e->s->uid = atomic_fetch_add(&machine->serial, 1) + 1;
		e->s->owner = self;
		e->s->pid = getpid();
		e->s->start = machine->process[self].start;
		held_set(e->s->held, self, 1);
	}
	machine_unlock();
	if (shared && e->entry < 0) {
		free(e);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	count_live(LIVE_EVENTS, 1);
	*out = e;
	return 0;
}

CUresult cuEventDestroy(CUevent e) {
	CONTEXT(c);
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	count_live(e->imported ? LIVE_OPEN_EVENTS : LIVE_EVENTS, -1);
	if (!e->imported)
		atomic_store(&e->s->destroyed, 1);
	put(e);
	return 0;
}

static void run_record(operation *o) {
	event_op *v = (event_op *)o;
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	v->e->ns = t.tv_sec * 1000000000ll + t.tv_nsec;
	event_fire(v->e->s, v->n);
	put(v->e);
}

static void skip_event(operation *o) { put(((event_op *)o)->e); }

CUresult cuEventRecord(CUevent e, CUstream s) {
	CONTEXT(c);
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	uint64_t n = atomic_fetch_add(&e->s->recorded, 1) + 1;
	return submit(s, e, n, run_record, skip_event);
}

// fired is called by waiters, too: it sees the death of an exporter, whose event then ends as the
// knob says.
static bool fired(CUevent e, uint64_t n) {
	if (atomic_load(&e->s->fired) >= n)
		return true;
	if (!e->imported || e->s->owner < 0 || process_start(e->s->pid) == e->s->start)
		return false;
	machine_lock();
	machine_sweep();
	machine_unlock();
	return atomic_load(&e->s->fired) >= n;
}

static void wait_for(CUevent e, uint64_t n) {
	struct timespec look = {0, 20000000}; // how soon a death is seen
	while (!sticky) {
		uint32_t v = atomic_load(&e->s->futex);
		if (fired(e, n))
			return;
		syscall(SYS_futex, &e->s->futex, FUTEX_WAIT, v, &look, NULL, 0);
	}
}

static void run_wait(operation *o) {
	event_op *v = (event_op *)o;
	wait_for(v->e, v->n);
	put(v->e);
}

CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned int flags) {
	CONTEXT(c);
	(void)flags;
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	count_total(TOTAL_WAIT_EVENTS, 1);
	return submit(s, e, atomic_load(&e->s->recorded), run_wait, skip_event);
}

CUresult cuEventQuery(CUevent e) {
	CONTEXT(c);
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	return fired(e, atomic_load(&e->s->recorded)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent e) {
	CONTEXT(c);
	if (!e)
		return CUDA_ERROR_INVALID_HANDLE;
	wait_for(e, atomic_load(&e->s->recorded));
	return sticky;
}

CUresult cuEventElapsedTime(float *ms, CUevent a, CUevent b) {
	CONTEXT(c);
	if (!a || !b || (a->flags | b->flags) & CU_EVENT_DISABLE_TIMING || !a->ns || !b->ns)
		return CUDA_ERROR_INVALID_HANDLE;
	*ms = (float)(b->ns - a->ns) / 1e6f;
	return 0;
}

CUresult cuIpcGetEventHandle(CUipcEventHandle *h, CUevent e) {
	CONTEXT(c);
	if (!e || e->entry < 0 || e->imported)
		return CUDA_ERROR_INVALID_VALUE;
	event_handle x = {.magic = EVENT_MAGIC, .uid = e->s->uid, .pid = getpid(), .entry = e->entry};
	memcpy(h, &x, sizeof x);
	return 0;
}

CUresult cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle h) {
	CONTEXT(c);
	event_handle x;
	memcpy(&x, &h, sizeof x);
	if (x.magic != EVENT_MAGIC || x.entry < 0 || x.entry >= MAX_EVENTS)
		return CUDA_ERROR_INVALID_VALUE;
	if (x.pid == getpid())
		return CUDA_ERROR_INVALID_CONTEXT;
	CUevent e = calloc(1, sizeof *e);
	if (!e)
		return CUDA_ERROR_OUT_OF_MEMORY;
	machine_lock();
	machine_sweep();
	e->s = &machine->event[x.entry];
	bool ok = e->s->uid == x.uid && !e->s->destroyed;
	if (ok)
		held_set(e->s->held, self, 1);
	machine_unlock();
	if (!ok) {
		free(e);
		return CUDA_ERROR_INVALID_HANDLE;
	}
	e->flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
	e->entry = x.entry;
	e->imported = true;
	e->refs = 1;
	count_live(LIVE_OPEN_EVENTS, 1);
	*out = e;
	return 0;
}

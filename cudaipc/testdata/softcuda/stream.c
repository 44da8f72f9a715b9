// Streams: a thread each, first in, first out.
#include "softcuda.h"
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { DRY_S = 20 }; // real seconds after which a copy engine without enough work has run dry

struct CUstream_st {
	pthread_mutex_t m;
	pthread_cond_t work, idle;
	operation *head, **tail;
	uint64_t submitted, ended;
	uint64_t queued, given; // bytes of copies: in the queue, and ever
	uint64_t ahead, job;    // SOFTCUDA_COPY_AHEAD; 0: none
	unsigned flags;
	int priority;
	bool stop;
	CUstream next;
};
static CUstream streams; // guarded by mine

static bool is_default(CUstream s) { return !s || s == CU_STREAM_LEGACY || s == CU_STREAM_PER_THREAD; }

static bool known(CUstream s) {
	pthread_mutex_lock(&mine);
	CUstream i = streams;
	while (i && i != s)
		i = i->next;
	pthread_mutex_unlock(&mine);
	return i != NULL;
}

static void operation_end(operation *o) {
	if (!sticky)
		o->run(o);
	else if (o->skip)
		o->skip(o);
	free(o);
}

// A copy engine with a virtual clock has the rate of hardware on any machine: the clock stands
// still until as many bytes are queued as it copies while a program takes its time to queue more,
// or all bytes of a job are. A program that queues no more before a copy ends stops it for ever: on
// hardware its copy engine would have been idle.
static void copy_ended(CUstream s) {
	struct timespec end;
	clock_gettime(CLOCK_REALTIME, &end);
	end.tv_sec += DRY_S;
	while (s->queued < s->ahead && s->given % s->job && !s->stop) {
		if (!pthread_cond_timedwait(&s->work, &s->m, &end))
			continue;
		fprintf(stderr, "softcuda: a copy engine runs dry in the middle of a job: %" PRIu64 " bytes are queued\n",
			s->queued);
		fault(CUDA_ERROR_LAUNCH_TIMEOUT);
		return;
	}
}

static void *worker(void *arg) {
	CUstream s = arg;
	pthread_mutex_lock(&s->m);
	for (;;) {
		while (!s->head && !s->stop)
			pthread_cond_wait(&s->work, &s->m);
		operation *o = s->head;
		if (!o)
			break;
		s->head = o->next;
		if (!s->head)
			s->tail = &s->head;
		uint64_t bytes = o->bytes;
		s->queued -= bytes;
		pthread_mutex_unlock(&s->m);
		operation_end(o);
		pthread_mutex_lock(&s->m);
		if (bytes && s->ahead)
			copy_ended(s);
		s->ended++;
		pthread_cond_broadcast(&s->idle);
	}
	pthread_mutex_unlock(&s->m);
	free(s);
	return NULL;
}

static void drain(CUstream s) {
	pthread_mutex_lock(&s->m);
	uint64_t upto = s->submitted;
	while (s->ended < upto)
		pthread_cond_wait(&s->idle, &s->m);
	pthread_mutex_unlock(&s->m);
}

void stream_drain_all(bool blocking_only) {
	enum { MOST = 1024 };
	CUstream list[MOST];
	int n = 0;
	pthread_mutex_lock(&mine);
	for (CUstream s = streams; s && n < MOST; s = s->next)
		if (!blocking_only || !(s->flags & CU_STREAM_NON_BLOCKING))
			list[n++] = s;
	pthread_mutex_unlock(&mine);
	for (int i = 0; i < n; i++)
		drain(list[i]);
}

CUresult stream_drain(CUstream s) {
	if (is_default(s))
		stream_drain_all(true);
	else if (known(s))
		drain(s);
	else
		return CUDA_ERROR_INVALID_HANDLE;
	return sticky;
}

// The default stream has no thread: its work is done in the caller, after that of the blocking
// streams.
CUresult stream_submit(CUstream s, operation *o) {
	if (!is_default(s) && !known(s)) {
		free(o);
		return CUDA_ERROR_INVALID_HANDLE;
	}
	if (is_default(s)) {
		stream_drain_all(true);
		operation_end(o);
		return sticky;
	}
	o->next = NULL;
	pthread_mutex_lock(&s->m);
	*s->tail = o;
	s->tail = &o->next;
	s->submitted++;
	s->queued += o->bytes;
	s->given += o->bytes;
	pthread_cond_signal(&s->work);
	pthread_mutex_unlock(&s->m);
	return 0;
}

CUresult cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority) {
	CONTEXT(c);
	if (flags & ~1u)
		return CUDA_ERROR_INVALID_VALUE;
	CUstream s = calloc(1, sizeof *s);
	if (!s)
		return CUDA_ERROR_OUT_OF_MEMORY;
	s->flags = flags;
	s->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
	s->tail = &s->head;
	const char *ahead = getenv("SOFTCUDA_COPY_AHEAD");
	if (ahead && *ahead && (sscanf(ahead, "%" SCNu64 ":%" SCNu64, &s->ahead, &s->job) != 2 || !s->job)) {
		free(s);
		return CUDA_ERROR_INVALID_VALUE;
	}
	pthread_mutex_init(&s->m, NULL);
	pthread_cond_init(&s->work, NULL);
	pthread_cond_init(&s->idle, NULL);
	pthread_t t;
	sigset_t all, old; // signals are for the program's threads
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &old);
	int failed = pthread_create(&t, NULL, worker, s);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (failed) {
		free(s);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_detach(t);
	pthread_mutex_lock(&mine);
	s->next = streams;
	streams = s;
	pthread_mutex_unlock(&mine);
	count_live(LIVE_STREAMS, 1);
	*out = s;
	return 0;
}

CUresult cuStreamCreate(CUstream *s, unsigned int flags) { return cuStreamCreateWithPriority(s, flags, 0); }

CUresult cuStreamDestroy(CUstream s) { // its pending work is done first
	CONTEXT(c);
	pthread_mutex_lock(&mine);
	CUstream *i = &streams;
	while (*i && *i != s)
		i = &(*i)->next;
	bool found = *i != NULL;
	if (found)
		*i = s->next;
	pthread_mutex_unlock(&mine);
	if (!found)
		return CUDA_ERROR_INVALID_HANDLE;
	count_live(LIVE_STREAMS, -1);
	pthread_mutex_lock(&s->m);
	s->stop = true;
	pthread_cond_signal(&s->work);
	pthread_mutex_unlock(&s->m);
	return 0;
}

CUresult cuStreamSynchronize(CUstream s) { CONTEXT(c); return stream_drain(s); }

CUresult cuStreamQuery(CUstream s) {
	CONTEXT(c);
	if (is_default(s))
		return 0;
	if (!known(s))
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&s->m);
	bool idle = s->ended == s->submitted;
	pthread_mutex_unlock(&s->m);
	return idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamGetFlags(CUstream s, unsigned int *f) { CONTEXT(c); *f = is_default(s) ? 0 : s->flags; return 0; }
CUresult cuStreamGetPriority(CUstream s, int *p) { CONTEXT(c); *p = is_default(s) ? 0 : s->priority; return 0; }

// Declarations that the parts of the double share within one process.
#pragma once
#define _GNU_SOURCE
#pragma GCC visibility push(default) // exactly the functions that cuda.h declares
#include <cuda.h>
#pragma GCC visibility pop
#include "machine.h"
#include <pthread.h>
#include <stdbool.h>

struct CUctx_st {
	int device, refs;
	unsigned flags;
	bool primary;
	size_t limit[8];
};

// process.c
extern _Atomic int sticky;      // the error after which every call of the process fails with it
extern int self;                // this process's slot
extern int device_count, first_device;
extern uint64_t device_bytes, context_bytes;
extern pthread_mutex_t mine;    // guards the tables of this process
extern int driver_version;
CUresult enter(const char *call);                       // knobs, and whether the driver is up; first in each call
CUresult enter_context(const char *call, CUcontext *c); // and a current context
void count_live(int what, int64_t by);
void count_total(int what, uint64_t by);
CUresult fault(int code);                               // makes code sticky
#define ENTER() do { CUresult r_ = enter(__func__); if (r_) return r_; } while (0)
#define CONTEXT(c) CUcontext c; do { \
	CUresult r_ = enter_context(__func__, &c); \
	if (r_) return r_; \
} while (0); (void)c

// context.c
CUcontext context_current(void);
bool device_ok(CUdevice d);

// window.c: device addresses and their memory
enum { ALLOCATED = 1, IMPORTED, PIECE };
typedef struct {
	CUdeviceptr va;
	uint64_t size;
	int kind, entry, device, refs, handle;
	bool access;
	uint64_t uid;
} segment;
int window_open(void);
bool window_has(CUdeviceptr p);
CUdeviceptr window_reserve(uint64_t size, uint64_t align);    // mine held; 0: none left
void window_release(CUdeviceptr p);                           // mine held
uint64_t window_reserved(CUdeviceptr p);                      // mine held: its size; 0: p does not begin a range
int window_map(segment s, int fd);                            // mine held
void window_unmap(CUdeviceptr p);                             // mine held
segment *window_at(CUdeviceptr p);                            // mine held
segment *window_find(int kind, int entry, uint64_t uid);      // mine held
bool window_covers(CUdeviceptr p, uint64_t n);                // mine held: all of it is mapped and may be touched
void *window_cpu(CUdeviceptr p);                              // where the double itself reads and writes it

// backing.c: the memory of allocations
CUresult backing_create(uint64_t bytes, int device, int *entry, uint64_t *uid, int *fd);
int backing_open(int entry, uint64_t uid);
void backing_drop(int entry);
bool backing_orphaned(int entry); // its exporter has died

// host.c
bool host_pinned(uint64_t address, uint64_t n);

// copy.c: what each copy does first
void copy_pause(void);                // SOFTCUDA_COPY_US, SOFTCUDA_COPY_HELD
void open_pause(void); // waits as long as the file that SOFTCUDA_OPEN_HELD names is there
// SOFTCUDA_COPIES_ON_DEATH: the memory's exporter has died, and with it the copy
bool copy_ends(CUdeviceptr p);

// stream.c
typedef struct operation operation;
struct operation {
	operation *next;
	uint64_t bytes; // that it copies; 0: it is no copy
	void (*run)(operation *);
	void (*skip)(operation *); // instead of run after a sticky error; NULL: nothing
};
CUresult stream_submit(CUstream s, operation *o); // takes o over
void stream_drain_all(bool blocking_only);
CUresult stream_drain(CUstream s);

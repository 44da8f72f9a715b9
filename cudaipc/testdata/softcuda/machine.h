// State that the processes of one pretended machine share: a file in SOFTCUDA_DIR, mapped by all of
// them.
#pragma once
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_PROCESSES = 256, MAX_ALLOCATIONS = 16384, MAX_EVENTS = 8192, MAX_DEVICES = 16 };

// Live counters are of a process and go with it; totals stay.
enum { LIVE_IMPORTS, LIVE_EVENTS, LIVE_OPEN_EVENTS, LIVE_STREAMS, LIVE_REGISTERED_BYTES, LIVE_VMM_HANDLES,
	LIVE_VMM_MAPS, LIVE_N };
enum { TOTAL_COPIES, TOTAL_BYTES, TOTAL_PAGEABLE_ASYNC, TOTAL_DEVICE_SYNCS, TOTAL_BATCH_CALLS, TOTAL_WAIT_EVENTS,
	TOTAL_N };

typedef struct {
	int pid;
	uint64_t start; // ticks since boot: tells a pid that is used again
	_Atomic int64_t live[LIVE_N];
} process_slot;

typedef uint64_t holders[MAX_PROCESSES / 64]; // one bit per process slot

typedef struct {
	uint64_t uid; // 0: free
	uint64_t bytes;
	int device, owner; // owner: process slot, -1 when it is gone
	holders held;      // the memory goes back with the last of them
} allocation;

typedef struct {
	uint64_t uid; // 0: free
	int owner;
	int pid;
	uint64_t start;
	_Atomic uint64_t recorded, fired;
	_Atomic uint32_t futex;
	_Atomic int destroyed;
	holders held;
} shared_event;

typedef struct {
	uint64_t magic;
	pthread_mutex_t lock; // robust: a process may be killed anywhere
	_Atomic uint64_t serial;
	_Atomic uint64_t total[TOTAL_N];
	process_slot process[MAX_PROCESSES];
	allocation memory[MAX_ALLOCATIONS];
	shared_event event[MAX_EVENTS];
} machine_state;

extern machine_state *machine;
int machine_open(void);                          // 0, or -1
void machine_lock(void);
void machine_unlock(void);
void machine_sweep(void);                        // lock held: releases what the dead hold
uint64_t machine_used(int device);               // lock held: bytes, -1 is of all devices
int machine_join(void);                          // a slot for this process, or -1
void machine_leave(int slot);
void machine_path(char *to, size_t room, int index, uint64_t uid);
int machine_drop(int index, int slot);           // lock held: ends a hold on an allocation
uint64_t process_start(int pid);                 // 0: dead, or a zombie
void held_set(holders h, int slot, int on);
int held_any(holders h);
void event_fire(shared_event *e, uint64_t upto);

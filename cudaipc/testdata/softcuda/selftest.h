// The double's own test: each case is a process of its own on a machine of its own, and leaves
// nothing there.
#pragma once
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MIB (1ull << 20)

// ends the process unless they are equal
void want(long got, long wanted, const char *what, const char *file, int line);
#define IS(wanted, call) want((long)(call), (long)(wanted), #call, __FILE__, __LINE__)
#define OK(call) IS(CUDA_SUCCESS, call)
#define TRUE(x) IS(1, !!(x))

CUcontext driver(void);     // this process's driver, its device 0 current in this thread
CUstream stream_new(void);  // a non-blocking one
void *pinned(size_t bytes); // freed with the process
void pause_ms(int ms);
#define EVENTUALLY(x) do { \
	for (int i_ = 0; i_ < 1000 && !(x); i_++) pause_ms(5); \
	TRUE(x); \
} while (0)
size_t used(void);      // bytes of device 0 that are in use, over all processes
int64_t live(int what); // a counter of machine.h, over all processes

// A peer is another process of the case. It is made before the driver is up: a forked child has
// none.
typedef struct {
	int pid, in, out;
} peer;
peer peer_new(void (*run)(peer));
void tell(peer p, const void *what, size_t n);
void hear(peer p, void *what, size_t n);
void peer_kill(peer p);
void peer_end(peer p); // it has to end well

typedef struct {
	const char *name;
	void (*run)(void);
	const char *knobs[4]; // NAME=value
} test_case;
// Cases of selftest_pieces.c.
void pieces(void);
void piece_of_the_dead(void);
void private_piece(void);
extern const test_case alone[], together[]; // a NULL name ends each

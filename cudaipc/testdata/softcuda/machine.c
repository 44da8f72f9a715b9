#define _GNU_SOURCE
#include "machine.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static const uint64_t MAGIC = 0x736f667463756432; // "softcud2"
machine_state *machine;
static char folder[256];

static void lock_init(pthread_mutex_t *m) {
	pthread_mutexattr_t a;
	pthread_mutexattr_init(&a);
	pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
	pthread_mutex_init(m, &a);
	pthread_mutexattr_destroy(&a);
}

// fire_on_death is the same in all processes of a machine.
static int fire_on_death(void) {
	const char *ending = getenv("SOFTCUDA_EVENTS_ON_DEATH");
	return ending && !strcmp(ending, "fire");
}

int machine_open(void) {
	const char *dir = getenv("SOFTCUDA_DIR");
	if (dir && *dir)
		snprintf(folder, sizeof folder, "%s", dir);
	else
		snprintf(folder, sizeof folder, "/dev/shm/softcuda.%u%s", getuid(), fire_on_death() ? ".fire" : "");
	mkdir(folder, 0700);
	char path[300];
	snprintf(path, sizeof path, "%s/machine", folder);
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (fd < 0 || flock(fd, LOCK_EX) || ftruncate(fd, sizeof(machine_state))) {
		if (fd >= 0)
			close(fd);
		return -1;
	}
	void *p = mmap(NULL, sizeof(machine_state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p != MAP_FAILED) {
		machine = p;
		if (machine->magic != MAGIC) {
			lock_init(&machine->lock);
			machine->magic = MAGIC;
		}
	}
	flock(fd, LOCK_UN); // the mapping keeps the open file, and with it the lock, beyond close
	close(fd);
	return p == MAP_FAILED ? -1 : 0;
}

void machine_lock(void) {
	if (pthread_mutex_lock(&machine->lock) == EOWNERDEAD)
		pthread_mutex_consistent(&machine->lock);
}

void machine_unlock(void) { pthread_mutex_unlock(&machine->lock); }

void machine_path(char *to, size_t room, int index, uint64_t uid) {
	snprintf(to, room, "%s/a.%d.%llx", folder, index, (unsigned long long)uid);
}

uint64_t process_start(int pid) {
	char path[64], text[1024];
	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	ssize_t n = read(fd, text, sizeof text - 1);
	close(fd);
	if (n <= 0)
		return 0;
	text[n] = 0;
	char *q = strrchr(text, ')'); // the name before it may hold anything
	if (!q || q[1] == 0 || q[2] == 'Z' || q[2] == 'X')
		return 0;
	for (int i = 0; q && i < 20; i++)
		q = strchr(q + 1, ' ');
	return q ? strtoull(q + 1, NULL, 10) : 0;
}

void held_set(holders h, int slot, int on) {
	uint64_t bit = 1ull << (slot % 64);
	h[slot / 64] = on ? h[slot / 64] | bit : h[slot / 64] & ~bit;
}

int held_any(holders h) {
	for (size_t i = 0; i < MAX_PROCESSES / 64; i++)
		if (h[i])
			return 1;
	return 0;
}

int machine_drop(int index, int slot) {
	allocation *a = &machine->memory[index];
	held_set(a->held, slot, 0);
	if (a->owner == slot)
		a->owner = -1;
	if (!a->uid || held_any(a->held))
		return 0;
	char path[320];
	machine_path(path, sizeof path, index, a->uid);
	unlink(path);
	a->uid = 0;
	return 1;
}

void event_fire(shared_event *e, uint64_t upto) {
	uint64_t was = atomic_load(&e->fired);
	while (was < upto && !atomic_compare_exchange_weak(&e->fired, &was, upto))
		;
	atomic_fetch_add(&e->futex, 1);
	syscall(SYS_futex, &e->futex, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

// event_on_death ends a pending event of a process that died: it fires or never does.
static void event_on_death(shared_event *e) {
	if (fire_on_death())
		event_fire(e, atomic_load(&e->recorded));
	e->owner = -1;
	atomic_store(&e->destroyed, 1);
}

static void slot_clear(int s) {
	for (int i = 0; i < MAX_ALLOCATIONS; i++)
		if (machine->memory[i].uid && (machine->memory[i].held[s / 64] >> (s % 64) & 1))
			machine_drop(i, s);
	for (int i = 0; i < MAX_EVENTS; i++) {
		shared_event *e = &machine->event[i];
		if (!e->uid)
			continue;
		if (e->owner == s)
			event_on_death(e);
		held_set(e->held, s, 0);
		if (!held_any(e->held))
			e->uid = 0;
	}
	memset(&machine->process[s], 0, sizeof machine->process[s]);
}

// drop_orphans takes back what slot_clear does not see: a process is a zombie when its first
// thread is, and another one may still have taken hold of memory; and one may be killed while it
// lets go.
static void drop_orphans(const holders live) {
	for (int i = 0; i < MAX_ALLOCATIONS; i++) {
		allocation *a = &machine->memory[i];
		if (!a->uid)
			continue;
		for (size_t w = 0; w < MAX_PROCESSES / 64; w++)
			while (a->uid && a->held[w] & ~live[w])
				machine_drop(i, (int)w * 64 + __builtin_ctzll(a->held[w] & ~live[w]));
		if (a->uid && !held_any(a->held))
			machine_drop(i, 0); // its last holder was killed while it dropped it
	}
}

void machine_sweep(void) {
	holders live = {0};
	for (int s = 0; s < MAX_PROCESSES; s++) {
		process_slot *p = &machine->process[s];
		if (p->pid && process_start(p->pid) != p->start)
			slot_clear(s);
		held_set(live, s, p->pid != 0);
	}
	drop_orphans(live);
}

int machine_join(void) {
	int found = -1;
	machine_lock();
	machine_sweep();
	for (int s = 0; s < MAX_PROCESSES && found < 0; s++)
		if (!machine->process[s].pid) {
			machine->process[s].start = process_start(getpid());
			machine->process[s].pid = getpid();
			found = s;
		}
	machine_unlock();
	return found;
}

void machine_leave(int slot) {
	machine_lock();
	slot_clear(slot);
	machine_unlock();
}

uint64_t machine_used(int device) {
	uint64_t n = 0;
	for (int i = 0; i < MAX_ALLOCATIONS; i++)
		if (machine->memory[i].uid && (device < 0 || machine->memory[i].device == device))
			n += machine->memory[i].bytes;
	return n;
}

// The memory of allocations: one file each in the machine's folder, with a count of its holders.
#include "softcuda.h"
#include <fcntl.h>
#include <unistd.h>

static int entry_take(uint64_t bytes, int device, uint64_t *uid) {
	for (int i = 0; i < MAX_ALLOCATIONS; i++) {
		allocation *a = &machine->memory[i];
		if (a->uid)
			continue;
		*uid = atomic_fetch_add(&machine->serial, 1) + 1;
		*a = (allocation){.uid = *uid, .bytes = bytes, .device = device, .owner = self};
		held_set(a->held, self, 1);
		return i;
	}
	return -1;
}

CUresult backing_create(uint64_t bytes, int device, int *entry, uint64_t *uid, int *fd) {
	machine_lock();
	machine_sweep();
	*entry = bytes > device_bytes || machine_used(device) > device_bytes - bytes ? -1 : entry_take(bytes, device, uid);
	machine_unlock();
	if (*entry < 0)
		return CUDA_ERROR_OUT_OF_MEMORY;
	char path[320];
	machine_path(path, sizeof path, *entry, *uid);
	*fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (*fd >= 0 && ftruncate(*fd, (off_t)((bytes + 4095) & ~4095ull)) == 0)
		return CUDA_SUCCESS;
	if (*fd >= 0)
		close(*fd);
	backing_drop(*entry);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

int backing_open(int entry, uint64_t uid) {
	char path[320];
	machine_path(path, sizeof path, entry, uid);
	return open(path, O_RDWR | O_CLOEXEC);
}

bool backing_orphaned(int entry) {
	machine_lock();
	machine_sweep();
	bool dead = machine->memory[entry].owner < 0;
	machine_unlock();
	return dead;
}

void backing_drop(int entry) {
	machine_lock();
	machine_drop(entry, self);
	machine_unlock();
}

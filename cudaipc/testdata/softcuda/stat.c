// softcuda-stat: prints what the processes of the machine SOFTCUDA_DIR hold now, and its totals,
// one "name value" per line.
#include "machine.h"
#include <stdio.h>

static const char *const live_names[LIVE_N] = {
	"imports", "events", "open_events", "streams", "registered_bytes", "vmm_handles", "vmm_maps"};
static const char *const total_names[TOTAL_N] = {
	"copies", "bytes", "pageable_async", "device_syncs", "batch_calls", "wait_events"};

int main(void) {
	if (machine_open())
		return 1;
	machine_lock();
	machine_sweep();
	int processes = 0;
	int64_t live[LIVE_N] = {0};
	for (int s = 0; s < MAX_PROCESSES; s++) {
		processes += machine->process[s].pid != 0;
		for (int i = 0; i < LIVE_N; i++)
			live[i] += machine->process[s].live[i];
	}
	printf("processes %d\nallocated_bytes %llu\n", processes, (unsigned long long)machine_used(-1));
	machine_unlock();
	for (int i = 0; i < LIVE_N; i++)
		printf("%s %lld\n", live_names[i], (long long)live[i]);
	for (int i = 0; i < TOTAL_N; i++)
		printf("%s %llu\n", total_names[i], (unsigned long long)machine->total[i]);
	return 0;
}

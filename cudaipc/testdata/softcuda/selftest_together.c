// Cases with several processes: memory and events that they share, and the remains of one that is
// killed.
#include "selftest.h"
#include "machine.h"
#include <fcntl.h>

static void exports_memory(peer p) {
	CUipcMemHandle h;
	CUdeviceptr d;
	char go;
	driver();
	OK(cuMemAlloc(&d, 4 * MIB));
	OK(cuMemsetD8(d, 0x5a, 4 * MIB));
	OK(cuIpcGetMemHandle(&h, d + MIB)); // names the whole allocation
	IS(CUDA_ERROR_INVALID_CONTEXT, cuIpcOpenMemHandle(&d, h, 1));
	tell(p, &h, sizeof h);
	hear(p, &go, 1);
}

static void import(void) {
	CUipcMemHandle h, wrong = {{0}};
	CUdeviceptr a, b;
	peer engine = peer_new(exports_memory);
	hear(engine, &h, sizeof h);
	driver();
	char *host = pinned(4096);
	IS(CUDA_ERROR_INVALID_VALUE, cuIpcOpenMemHandle(&a, wrong, 1));
	OK(cuIpcOpenMemHandle(&a, h, 1));
	OK(cuIpcOpenMemHandle(&b, h, 1)); // again: counted
	TRUE(a == b);
	IS(2, live(LIVE_IMPORTS));
	OK(cuIpcCloseMemHandle(a));
	OK(cuMemcpyDtoH(host, a + 3 * MIB, 4096));
	TRUE(host[0] == 0x5a && host[4095] == 0x5a);
	OK(cuMemsetD8(a, 1, 1));
	OK(cuIpcCloseMemHandle(a));
	IS(CUDA_ERROR_INVALID_VALUE, cuIpcCloseMemHandle(a));
	IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(host, a, 1));
	IS(0, live(LIVE_IMPORTS));
	IS(4 * MIB, used());
	tell(engine, "", 1);
	peer_end(engine);
	IS(0, used());
}

static void import_after_death(void) {
	CUipcMemHandle h;
	CUdeviceptr a;
	peer engine = peer_new(exports_memory);
	hear(engine, &h, sizeof h);
	driver();
	char *host = pinned(4096);
	OK(cuIpcOpenMemHandle(&a, h, 1));
	peer_kill(engine);
	OK(cuMemcpyDtoH(host, a, 4096)); // an open mapping stays
	IS(0x5a, host[0]);
	IS(4 * MIB, used());
	OK(cuIpcCloseMemHandle(a));
	IS(0, used());
	IS(CUDA_ERROR_INVALID_HANDLE, cuIpcOpenMemHandle(&a, h, 1));
}

// Copies of the memory of a process that dies: those that begin when it is dead move nothing with
// the knob, either way; and no error is reported.
static void copies_after_death(void) {
	CUipcMemHandle h;
	CUdeviceptr a;
	peer engine = peer_new(exports_memory);
	hear(engine, &h, sizeof h);
	driver();
	char *host = pinned(4096);
	CUstream s = stream_new();
	CUdeviceptr word = (uintptr_t)pinned(4096);
	OK(cuIpcOpenMemHandle(&a, h, 1));
	OK(cuMemcpyDtoHAsync(host, a, 8, s));
	OK(cuStreamSynchronize(s));
	OK(cuStreamWaitValue32(s, word, 1, CU_STREAM_WAIT_VALUE_GEQ));
	OK(cuMemcpyDtoHAsync(host + 100, a, 8, s));
	OK(cuMemcpyHtoDAsync(a + 8, host + 200, 8, s));
	peer_kill(engine);
	*(volatile uint32_t *)(uintptr_t)word = 1;
	OK(cuStreamSynchronize(s));
	bool finish = !getenv("SOFTCUDA_COPIES_ON_DEATH");
	TRUE(host[0] == 0x5a);
	IS(finish ? 0x5a : 0, host[100]);
	unsetenv("SOFTCUDA_COPIES_ON_DEATH");
	OK(cuMemcpyDtoH(host, a + 8, 8));
	IS(finish ? 0 : 0x5a, host[0]);
	OK(cuIpcCloseMemHandle(a));
}

// The importer dies: the exporter has its memory still, and gets it back by freeing it.
static void imports_and_waits(peer p) {
	CUipcMemHandle h;
	CUdeviceptr a;
	hear(p, &h, sizeof h);
	driver();
	OK(cuIpcOpenMemHandle(&a, h, 1));
	tell(p, "", 1);
	pause();
}

static void importer_killed(void) {
	CUipcMemHandle h;
	CUdeviceptr d;
	char done;
	peer agent = peer_new(imports_and_waits);
	driver();
	OK(cuMemAlloc(&d, 2 * MIB));
	OK(cuIpcGetMemHandle(&h, d));
	tell(agent, &h, sizeof h);
	hear(agent, &done, 1);
	OK(cuMemFree(d));
	IS(2 * MIB, used()); // the importer's mapping holds it
	peer_kill(agent);
	IS(0, used());
}

static void records_behind_a_word(peer p) {
	CUipcEventHandle h;
	CUevent e;
	driver();
	CUdeviceptr word = (uintptr_t)pinned(4096);
	CUstream s = stream_new();
	OK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
	OK(cuStreamWaitValue32(s, word, 1, CU_STREAM_WAIT_VALUE_GEQ));
	OK(cuEventRecord(e, s));
	OK(cuIpcGetEventHandle(&h, e));
	tell(p, &h, sizeof h);
	char go;
	hear(p, &go, 1);
	*(volatile uint32_t *)(uintptr_t)word = 1;
	hear(p, &go, 1);
}

static CUevent imported(peer engine) {
	CUipcEventHandle h;
	CUevent e;
	hear(engine, &h, sizeof h);
	driver();
	OK(cuIpcOpenEventHandle(&e, h));
	IS(CUDA_ERROR_NOT_READY, cuEventQuery(e));
	return e;
}

static void event(void) {
	peer engine = peer_new(records_behind_a_word);
	CUevent e = imported(engine);
	IS(1, live(LIVE_OPEN_EVENTS));
	tell(engine, "", 1);
	EVENTUALLY(cuEventQuery(e) == CUDA_SUCCESS);
	tell(engine, "", 1);
	peer_end(engine);
	OK(cuEventDestroy(e));
	IS(0, live(LIVE_OPEN_EVENTS));
}

static void event_fires(void) {
	peer engine = peer_new(records_behind_a_word);
	CUevent e = imported(engine);
	peer_kill(engine);
	OK(cuEventQuery(e));
	OK(cuEventDestroy(e));
}

static void event_never_fires(void) {
	peer engine = peer_new(records_behind_a_word);
	CUevent e = imported(engine);
	CUstream s = stream_new();
	peer_kill(engine);
	OK(cuStreamWaitEvent(s, e, 0));
	pause_ms(100);
	IS(CUDA_ERROR_NOT_READY, cuEventQuery(e));
	IS(CUDA_ERROR_NOT_READY, cuStreamQuery(s)); // waits for ever
}

static void hangs_at_the_second(peer p) {
	driver();
	CUdeviceptr d;
	OK(cuMemAlloc(&d, MIB));
	tell(p, "", 1);
	cuMemAlloc(&d, MIB);
	tell(p, "", 1);
}

static void hang(void) {
	char byte;
	peer one = peer_new(hangs_at_the_second);
	hear(one, &byte, 1);
	fcntl(one.in, F_SETFL, O_NONBLOCK);
	pause_ms(200);
	IS(-1, read(one.in, &byte, 1));
	peer_kill(one);
}

// Killed anywhere, while it holds the machine's lock too: the others go on, and nothing of it is
// left.
static void busy(peer p) {
	driver();
	tell(p, "", 1);
	for (;;) {
		CUdeviceptr d;
		OK(cuMemAlloc(&d, 64 << 10));
		OK(cuMemFree(d));
	}
}

static void killed_anywhere(void) {
	enum { KILLS = 40 };
	peer all[KILLS];
	for (int i = 0; i < KILLS; i++) {
		char up;
		all[i] = peer_new(busy);
		hear(all[i], &up, 1);
		pause_ms(i % 5);
		peer_kill(all[i]);
	}
	driver();
	IS(0, used());
}

const test_case together[] = {
	{"import", import, {0}},
	{"import after death", import_after_death, {0}},
	{"copies after death finish", copies_after_death, {0}},
	{"copies after death end", copies_after_death, {"SOFTCUDA_COPIES_ON_DEATH=end"}},
	{"importer killed", importer_killed, {0}},
	{"event", event, {0}},
	{"event after death fires", event_fires, {"SOFTCUDA_EVENTS_ON_DEATH=fire"}},
	{"event after death never fires", event_never_fires, {0}},
	{"hang", hang, {"SOFTCUDA_HANG=cuMemAlloc:2"}},
	{"killed anywhere", killed_anywhere, {0}},
	{"pieces", pieces, {0}},
	{"piece of the dead", piece_of_the_dead, {0}},
	{"private piece", private_piece, {0}},
	{0},
};

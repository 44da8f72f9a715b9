// What processes see of each other, and what is left of one that is killed.
#include "selftest.h"
#include "machine.h"
#include <fcntl.h>
#include <sys/socket.h>

static size_t left(void) {
	size_t n, all;
	OK(cuMemGetInfo(&n, &all));
	return all - n;
}

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
	IS(4 * MIB, left());
	tell(engine, "", 1);
	peer_end(engine);
	IS(0, left());
}

static void import_of_the_dead(void) {
	CUipcMemHandle h;
	CUdeviceptr a;
	peer engine = peer_new(exports_memory);
	hear(engine, &h, sizeof h);
	driver();
	char *host = pinned(4096);
	OK(cuIpcOpenMemHandle(&a, h, 1));
	peer_kill(engine);
	OK(cuMemcpyDtoH(host, a, 4096)); // what is open stays
	IS(0x5a, host[0]);
	IS(4 * MIB, left());
	OK(cuIpcCloseMemHandle(a));
	IS(0, left());
	IS(CUDA_ERROR_INVALID_HANDLE, cuIpcOpenMemHandle(&a, h, 1));
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
	IS(2 * MIB, left()); // the importer's mapping holds it
	peer_kill(agent);
	IS(0, left());
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

// Killed anywhere, while it holds the machine's lock too: the others go on, and nothing of it is left.
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
	IS(0, left());
}

static void send_fd(int over, int fd) {
	char byte = 0, room[CMSG_SPACE(sizeof fd)] = {0};
	struct iovec v = {&byte, 1};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof fd);
	memcpy(CMSG_DATA(c), &fd, sizeof fd);
	IS(1, sendmsg(over, &m, 0));
}

static int receive_fd(int over) {
	char byte, room[CMSG_SPACE(sizeof(int))];
	struct iovec v = {&byte, 1};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
	int fd;
	IS(1, recvmsg(over, &m, 0));
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
	return fd;
}

enum { PIECES = 3, PIECE = 2 << 20 };
static int sockets[2];

static void map_piece(CUdeviceptr at, CUmemGenericAllocationHandle h) {
	CUmemAccessDesc a = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	char *host = pinned(1);
	OK(cuMemMap(at, PIECE, 0, h, 0));
	IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(host, at, 1)); // mapped, but nobody may touch it
	OK(cuMemSetAccess(at, PIECE, &a, 1));
	OK(cuMemFreeHost(host));
}

static void exports_pieces(peer p) {
	CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
	CUdeviceptr at;
	char go;
	prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	driver();
	OK(cuMemAddressReserve(&at, PIECES * PIECE, 0, 0, 0));
	for (int i = 0; i < PIECES; i++) {
		CUmemGenericAllocationHandle h;
		int fd;
		OK(cuMemCreate(&h, PIECE, &prop, 0));
		map_piece(at + (size_t)i * PIECE, h);
		OK(cuMemsetD8(at + (size_t)i * PIECE, (unsigned char)(i + 1), PIECE));
		OK(cuMemExportToShareableHandle(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
		OK(cuMemRelease(h)); // the mapping keeps it
		send_fd(sockets[0], fd);
		close(fd);
	}
	hear(p, &go, 1);
}

static void pieces(void) {
	OK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets));
	peer engine = peer_new(exports_pieces);
	driver();
	char *host = pinned(PIECES * PIECE);
	CUdeviceptr at;
	OK(cuMemAddressReserve(&at, PIECES * PIECE, 0, 0, 0));
	for (int i = 0; i < PIECES; i++) {
		CUmemGenericAllocationHandle h;
		int fd = receive_fd(sockets[1]);
		OK(cuMemImportFromShareableHandle(&h, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
		close(fd);
		map_piece(at + (size_t)i * PIECE, h);
		OK(cuMemRelease(h));
		IS(CUDA_ERROR_INVALID_VALUE, cuMemRelease(h));
	}
	peer_kill(engine);
	OK(cuMemcpyDtoH(host, at, PIECES * PIECE)); // over the seams, and after the exporter's death
	for (int i = 0; i < PIECES; i++)
		TRUE(host[(size_t)i * PIECE] == i + 1 && host[(size_t)(i + 1) * PIECE - 1] == i + 1);
	IS(PIECES * PIECE, left());
	IS(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(at, PIECES * PIECE));
	OK(cuMemUnmap(at, PIECES * PIECE));
	OK(cuMemAddressFree(at, PIECES * PIECE));
	IS(0, left());
	IS(0, live(LIVE_VMM_MAPS) + live(LIVE_VMM_HANDLES));
}

const test_case together[] = {
	{"import", import, {0}},
	{"import of the dead", import_of_the_dead, {0}},
	{"importer killed", importer_killed, {0}},
	{"event", event, {0}},
	{"event of the dead fires", event_fires, {0}},
	{"event of the dead never fires", event_never_fires, {"SOFTCUDA_EVENTS_OF_THE_DEAD=never"}},
	{"hang", hang, {"SOFTCUDA_HANG=cuMemAlloc:2"}},
	{"killed anywhere", killed_anywhere, {0}},
	{"pieces", pieces, {0}},
	{0},
};

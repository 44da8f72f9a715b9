// Virtual memory that goes from one process to another as descriptors.
#include "selftest.h"
#include "machine.h"
#include <sys/socket.h>

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
	IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(host, at, 1)); // mapped without access
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

void pieces(void) {
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
	IS(PIECES * PIECE, used());
	IS(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(at, PIECES * PIECE));
	OK(cuMemUnmap(at, PIECES * PIECE));
	OK(cuMemAddressFree(at, PIECES * PIECE));
	IS(0, used());
	IS(0, live(LIVE_VMM_MAPS) + live(LIVE_VMM_HANDLES));
}

// A piece that was imported is not mapped any more when its exporter has ended.
void piece_of_the_dead(void) {
	OK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets));
	peer engine = peer_new(exports_pieces);
	driver();
	CUdeviceptr at;
	CUmemGenericAllocationHandle h;
	OK(cuMemAddressReserve(&at, PIECE, 0, 0, 0));
	int fd = receive_fd(sockets[1]);
	OK(cuMemImportFromShareableHandle(&h, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	close(fd);
	for (int i = 1; i < PIECES; i++)
		close(receive_fd(sockets[1]));
	peer_kill(engine);
	IS(CUDA_ERROR_NOT_SUPPORTED, cuMemMap(at, PIECE, 0, h, 0));
	OK(cuMemRelease(h));
	OK(cuMemAddressFree(at, PIECE));
	IS(0, used());
}

// Memory that was made without an export flag, as vLLM's sleep mode makes it, has no descriptor.
void private_piece(void) {
	CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
	CUmemGenericAllocationHandle h;
	int fd;
	driver();
	OK(cuMemCreate(&h, PIECE, &prop, 0));
	IS(CUDA_ERROR_INVALID_VALUE, cuMemExportToShareableHandle(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	OK(cuMemRelease(h));
}

// Cases with one process and its driver.
#include "selftest.h"
#include "machine.h"

static CUdeviceptr filled(size_t bytes, unsigned char with) {
	CUdeviceptr p;
	OK(cuMemAlloc(&p, bytes));
	OK(cuMemsetD8(p, with, bytes));
	return p;
}

static void window(void) {
	driver();
	CUdeviceptr p = filled(MIB, 7);
	int pid = fork(), status;
	if (!pid) {
		*(volatile char *)(uintptr_t)p = 1;
		_exit(0);
	}
	waitpid(pid, &status, 0);
	TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
	char *host = pinned(MIB);
	IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(host, p + MIB - 8, 16)); // beyond the end
	OK(cuMemcpyDtoH(host, p + MIB - 8, 8));
	IS(7, host[7]);
	OK(cuMemFree(p));
	IS(CUDA_ERROR_INVALID_VALUE, cuMemFree(p));
	IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(host, p, 8));
}

static void forked(void) {
	driver();
	int pid = fork(), status;
	if (!pid)
		_exit(cuInit(0) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
	waitpid(pid, &status, 0);
	IS(0, status);
}

static void *without_context(void *context) {
	CUdeviceptr p;
	IS(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc(&p, MIB));
	IS(CUDA_ERROR_INVALID_CONTEXT, cuStreamSynchronize(NULL));
	OK(cuCtxPushCurrent(context));
	OK(cuMemAlloc(&p, MIB));
	OK(cuMemFree(p));
	return NULL;
}

static void contexts(void) {
	CUcontext c = driver();
	pthread_t t;
	TRUE(!pthread_create(&t, NULL, without_context, c));
	pthread_join(t, NULL);
	CUdeviceptr p;
	OK(cuDevicePrimaryCtxRelease(0));
	IS(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc(&p, MIB));
	IS(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease(0));
}

static void devices(void) {
	CUuuid u[4], v;
	CUdeviceptr p;
	CUcontext c;
	unsigned ordinal = 0;
	int n;
	driver();
	OK(cuDeviceGetCount(&n));
	IS(4, n);
	for (int i = 0; i < n; i++) {
		OK(cuDeviceGetUuid(&u[i], i));
		OK(cuDeviceGetUuid_v2(&v, i));
		TRUE(!memcmp(&u[i], &v, sizeof v));
		for (int j = 0; j < i; j++)
			TRUE(memcmp(&u[i], &u[j], sizeof v));
	}
	IS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetUuid(&v, n));
	OK(cuDevicePrimaryCtxRetain(&c, 3));
	OK(cuCtxSetCurrent(c));
	OK(cuMemAlloc(&p, MIB));
	OK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p));
	IS(3, ordinal);
}

static void no_device(void) { IS(CUDA_ERROR_NO_DEVICE, cuInit(0)); }

static void out_of_memory(void) {
	CUdeviceptr p, q;
	size_t left, all;
	driver();
	OK(cuMemAlloc(&p, 6 * MIB));
	IS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&q, 4 * MIB));
	OK(cuMemGetInfo(&left, &all));
	IS(2 * MIB, left);
	IS(8 * MIB, all);
	OK(cuMemFree(p));
	OK(cuMemAlloc(&q, 8 * MIB));
}

static void pinning(void) {
	driver();
	size_t n = 64 << 10;
	char *p = mmap(NULL, 2 * n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	OK(cuMemHostRegister(p, n, CU_MEMHOSTREGISTER_PORTABLE));
	IS(712, cuMemHostRegister(p, n, 0));
	IS(712, cuMemHostRegister(p + n / 2, n, 0));
	OK(cuMemHostRegister(p + n, n, 0));
	IS(2 * (int64_t)n, live(LIVE_REGISTERED_BYTES));
	IS(713, cuMemHostUnregister(p + 1));
	OK(cuMemHostUnregister(p));
	IS(713, cuMemHostUnregister(p));
	CUdeviceptr d = filled(n, 3);
	CUstream s = stream_new();
	uint64_t before = atomic_load(&machine->total[TOTAL_PAGEABLE_ASYNC]);
	OK(cuMemcpyDtoHAsync(p + n, d, n, s)); // pinned
	IS(before, machine->total[TOTAL_PAGEABLE_ASYNC]);
	OK(cuMemcpyDtoHAsync(p, d, n, s)); // not any more: over when the call returns
	IS(before + 1, machine->total[TOTAL_PAGEABLE_ASYNC]);
	TRUE(p[0] == 3 && p[n - 1] == 3);
	OK(cuStreamSynchronize(s));
}

// A word that a stream waits for holds back all that was enqueued after it, and nothing of another
// stream.
static void order(void) {
	driver();
	CUdeviceptr d = filled(MIB, 9);
	char *host = pinned(MIB);
	CUdeviceptr word = (uintptr_t)pinned(4096);
	CUstream held = stream_new(), free_one = stream_new();
	CUevent e;
	OK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
	OK(cuStreamWaitValue32(held, word, 1, CU_STREAM_WAIT_VALUE_GEQ));
	OK(cuMemcpyDtoHAsync(host, d, MIB, held));
	OK(cuEventRecord(e, held));
	OK(cuMemcpyDtoHAsync(host + MIB / 2, d, 1, free_one));
	OK(cuStreamSynchronize(free_one));
	IS(CUDA_ERROR_NOT_READY, cuEventQuery(e));
	IS(CUDA_ERROR_NOT_READY, cuStreamQuery(held));
	TRUE(host[0] == 0 && host[MIB / 2] == 9);
	OK(cuStreamWriteValue32(free_one, word, 1, 0));
	OK(cuEventSynchronize(e));
	TRUE(host[0] == 9 && host[MIB - 1] == 9);
	OK(cuStreamDestroy(held));
	IS(CUDA_ERROR_INVALID_HANDLE, cuMemcpyDtoHAsync(host, d, 1, held));
	OK(cuEventDestroy(e));
}

static int batch_found(int version, void **f) {
	CUdriverProcAddressQueryResult how;
	cuGetProcAddress("cuMemcpyBatchAsync", f, version, 0, &how);
	return (int)how;
}

static void batch_order(int version, void *f) {
	enum { N = 64 };
	CUdeviceptr d = filled(N * 4096, 5), dst[N], src[N], word = (uintptr_t)pinned(4096);
	size_t size[N], first = 0, failed = 0;
	char *host = pinned(N * 4096);
	CUstream s = stream_new();
	CUmemcpyAttributes a = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
	for (int i = 0; i < N; i++) {
		dst[i] = (uintptr_t)host + (size_t)i * 4096;
		src[i] = d + (size_t)i * 4096;
		size[i] = 4096;
	}
	OK(cuStreamWaitValue32(s, word, 1, CU_STREAM_WAIT_VALUE_GEQ));
	if (version == 12080)
		OK(((PFN_cuMemcpyBatchAsync_v12080)f)(dst, src, size, N, &a, &first, 1, &failed, s));
	else
		OK(((PFN_cuMemcpyBatchAsync_v13000)f)(dst, src, size, N, &a, &first, 1, s));
	IS(CUDA_ERROR_NOT_READY, cuStreamQuery(s));
	pause_ms(20);
	TRUE(host[0] == 0 && host[N * 4096 - 1] == 0);
	*(volatile uint32_t *)(uintptr_t)word = 1;
	OK(cuStreamSynchronize(s));
	TRUE(host[0] == 5 && host[N * 4096 - 1] == 5);
	if (version == 12080) {
		src[17] = d + N * 4096ull;
		IS(CUDA_ERROR_INVALID_VALUE, ((PFN_cuMemcpyBatchAsync_v12080)f)(dst, src, size, N, &a, &first, 1, &failed, s));
		IS(17, failed);
	}
}

static void batch_12(void) {
	void *f;
	driver();
	IS(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT, batch_found(13000, &f));
	IS(CU_GET_PROC_ADDRESS_SUCCESS, batch_found(12080, &f));
	batch_order(12080, f);
}

static void batch_13(void) {
	void *twelve, *thirteen;
	driver();
	IS(CU_GET_PROC_ADDRESS_SUCCESS, batch_found(12080, &twelve));
	IS(CU_GET_PROC_ADDRESS_SUCCESS, batch_found(13000, &thirteen));
	TRUE(twelve != thirteen);
	batch_order(12080, twelve);
	batch_order(13000, thirteen);
}

static void batch_none(void) {
	void *f;
	driver();
	IS(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, batch_found(12080, &f));
	TRUE(!f);
}

static void injected(void) {
	CUdeviceptr p, q;
	driver();
	OK(cuMemAlloc(&p, MIB));
	IS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&q, MIB)); // the second call
	OK(cuMemAlloc(&q, MIB));
	IS(CUDA_ERROR_NOT_READY, cuStreamQuery(NULL)); // each call
	IS(CUDA_ERROR_NOT_READY, cuStreamQuery(NULL));
}

static void sticky_error(void) {
	driver();
	CUdeviceptr p = filled(MIB, 1), q;
	IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamQuery(NULL));
	IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemAlloc(&q, MIB));
	IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemFree(p));
	IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuDevicePrimaryCtxRelease(0));
}

static void unsupported(void) {
	CUmodule m;
	driver();
	IS(CUDA_ERROR_NOT_SUPPORTED, cuModuleLoad(&m, ""));
}

const test_case alone[] = {
	{"window", window, {0}},
	{"forked", forked, {0}},
	{"contexts", contexts, {0}},
	{"devices", devices, {"SOFTCUDA_DEVICES=4"}},
	{"no device", no_device, {"SOFTCUDA_DEVICES=0"}},
	{"out of memory", out_of_memory, {"SOFTCUDA_MEMORY=8388608"}},
	{"pinning", pinning, {0}},
	{"order", order, {0}},
	{"batch of 12.8", batch_12, {0}},
	{"batch of 13", batch_13, {"SOFTCUDA_DRIVER_VERSION=13000"}},
	{"batch before 12.8", batch_none, {"SOFTCUDA_DRIVER_VERSION=12070"}},
	{"no batch", batch_none, {"SOFTCUDA_NO_BATCH=1"}},
	{"injected failures", injected, {"SOFTCUDA_FAIL=cuMemAlloc:2:2,cuStreamQuery:0:600"}},
	{"sticky error", sticky_error, {"SOFTCUDA_FAIL=cuStreamQuery:1:700"}},
	{"unsupported", unsupported, {0}},
	{0},
};

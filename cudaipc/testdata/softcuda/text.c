// Names of errors, and the calls that the double has not.
#include "softcuda.h"
#include <stdio.h>

#define NAME(n) case n: return #n;
static const char *name_of(CUresult r) {
	switch (r) {
	NAME(CUDA_SUCCESS) NAME(CUDA_ERROR_INVALID_VALUE) NAME(CUDA_ERROR_OUT_OF_MEMORY) NAME(CUDA_ERROR_NOT_INITIALIZED)
	NAME(CUDA_ERROR_NO_DEVICE) NAME(CUDA_ERROR_INVALID_DEVICE) NAME(CUDA_ERROR_INVALID_CONTEXT)
	NAME(CUDA_ERROR_MAP_FAILED)
	NAME(CUDA_ERROR_ECC_UNCORRECTABLE) NAME(CUDA_ERROR_OPERATING_SYSTEM)
	NAME(CUDA_ERROR_INVALID_HANDLE) NAME(CUDA_ERROR_NOT_FOUND)
	NAME(CUDA_ERROR_NOT_READY) NAME(CUDA_ERROR_ILLEGAL_ADDRESS) NAME(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
	NAME(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED) NAME(CUDA_ERROR_LAUNCH_FAILED)
	NAME(CUDA_ERROR_NOT_SUPPORTED) NAME(CUDA_ERROR_UNKNOWN)
	default: return NULL;
	}
}

CUresult cuGetErrorName(CUresult r, const char **name) {
	*name = name_of(r);
	return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult r, const char **text) { return cuGetErrorName(r, text); }

int softcuda_unsupported(const char *name, atomic_flag *said);
int softcuda_unsupported(const char *name, atomic_flag *said) {
	if (!atomic_flag_test_and_set(said))
		fprintf(stderr, "softcuda: %s is not supported\n", name);
	return CUDA_ERROR_NOT_SUPPORTED;
}

//go:build cuda

// Defines the symbols of the CUDA driver as jumps into libcuda.so.1, which is opened at run time:
// see doc.go.
#include "shim.h"

#include <dlfcn.h>
#include <stdio.h>

static int not_initialized(void) { return 3; } // CUDA_ERROR_NOT_INITIALIZED
static int not_found(void) { return 500; }     // CUDA_ERROR_NOT_FOUND: the library is older than the symbol

enum {
#define X(name) INDEX_##name,
#include "symbols.h"
#undef X
	SYMBOLS
};

static const char *const names[SYMBOLS] = {
#define X(name) #name,
#include "symbols.h"
#undef X
};

__attribute__((visibility("hidden"))) void *kvdrv_table[SYMBOLS] = {
#define X(name) (void *)not_initialized,
#include "symbols.h"
#undef X
};

// Hidden, so that the library's own references to its symbols are not bound to these.
#if defined(__x86_64__)
#define JUMP(name, i)                                                                  \
	__asm__(".text\n.globl " #name "\n.hidden " #name "\n.type " #name ", @function\n" \
	        #name ":\n\tjmp *kvdrv_table+8*" #i "(%rip)\n.size " #name ", .-" #name "\n");
#elif defined(__aarch64__)
#define JUMP(name, i)                                                                  \
	__asm__(".text\n.globl " #name "\n.hidden " #name "\n.type " #name ", %function\n" \
	        #name ":\n\tadrp x16, kvdrv_table+8*" #i "\n"                              \
	        "\tldr x16, [x16, :lo12:kvdrv_table+8*" #i "]\n\tbr x16\n.size " #name ", .-" #name "\n");
#else
#error "the jumps are written for amd64 and arm64"
#endif
#define JUMP_AT(name, i) JUMP(name, i)
#define X(name) JUMP_AT(name, __COUNTER__)
#include "symbols.h"
#undef X

static void *library;

int kvdrv_load(const char *path, char *why, size_t room) {
	library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!library) {
		const char *reason = dlerror();
		snprintf(why, room, "%s", reason ? reason : "dlopen failed");
		return -1;
	}
	for (int i = 0; i < SYMBOLS; i++) {
		void *symbol = dlsym(library, names[i]);
		kvdrv_table[i] = symbol ? symbol : (void *)not_found;
	}
	return 0;
}

void *kvdrv_symbol(const char *name) { return library ? dlsym(library, name) : NULL; }

int kvdrv_init(void) {
	int (*init)(unsigned) = (int (*)(unsigned))kvdrv_symbol("cuInit");
	return init ? init(0) : 500;
}

// cu's: see doc.go.
__attribute__((visibility("hidden"))) int cuInit(unsigned flags) {
	(void)flags;
	return 0;
}

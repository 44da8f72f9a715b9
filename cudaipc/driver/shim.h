// The functions of shim.c that are not symbols of the driver.
#pragma once
#include <stddef.h>

// kvdrv_load opens the library at path and fills the table. 0, or -1 with a text in why. Called
// once.
int kvdrv_load(const char *path, char *why, size_t room);
// kvdrv_init calls the library's cuInit and gives its CUresult.
int kvdrv_init(void);
// kvdrv_symbol looks a symbol of the library up that need not be there; NULL if it is not.
void *kvdrv_symbol(const char *name);

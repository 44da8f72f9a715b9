//go:build cuda

package driver

/*
#cgo LDFLAGS: -L${SRCDIR}/stublib -ldl
#cgo CFLAGS: -Wall -Wextra
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"gorgonia.org/cu"
)

// ErrNoLibrary reports that this machine has no driver.
var ErrNoLibrary = errors.New("no CUDA driver library")

// Load opens the driver's library and initialises it, once. Any thread may call it, also again.
func Load() error { return load() }

var load = sync.OnceValue(func() error {
	path, why := C.CString(library()), [512]C.char{}
	defer C.free(unsafe.Pointer(path))
	if C.kvdrv_load(path, &why[0], C.size_t(len(why))) != 0 {
		return fmt.Errorf("%w: %s", ErrNoLibrary, C.GoString(&why[0]))
	}
	return check("cuInit", int(C.kvdrv_init()))
})

// Version returns the newest CUDA that the driver supports, 1000 * major + 10 * minor.
func Version() int { return cu.Version() }

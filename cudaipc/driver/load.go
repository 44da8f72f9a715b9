//go:build cuda

package driver

/*
#cgo CFLAGS: -Wall -Wextra
#cgo LDFLAGS: -L${SRCDIR}/stublib -ldl
#include <cuda.h>
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"reflect"
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

// Error is an answer of the driver other than success.
type Error struct {
	Call string
	Code int // CUresult
}

func (e *Error) Error() string {
	var name, text *C.char
	if C.cuGetErrorName(C.CUresult(e.Code), &name) != C.CUDA_SUCCESS || name == nil {
		return fmt.Sprintf("%s: CUDA error %d", e.Call, e.Code)
	}
	if C.cuGetErrorString(C.CUresult(e.Code), &text) != C.CUDA_SUCCESS || text == nil {
		return fmt.Sprintf("%s: %s (%d)", e.Call, C.GoString(name), e.Code)
	}
	return fmt.Sprintf("%s: %s (%d), %s", e.Call, C.GoString(name), e.Code, C.GoString(text))
}

// The codes that callers branch on.
const (
	InvalidValue  = 1
	OutOfMemory   = 2
	NoDevice      = 100
	InvalidHandle = 400
	NotSupported  = 801

	DeviceUnavailable = 46
	SystemNotReady    = 802
	DriverMismatch    = 803
	CompatUnsupported = 804
	Unknown           = 999
)

// sticky are the errors that, by the driver's reference, leave the process in an inconsistent
// state so that it must end; those of the hardware; and the unknown error.
var sticky = map[int]bool{
	4: true, 46: true, 214: true, 220: true, 226: true, 700: true, 702: true, 709: true, 710: true, 714: true,
	715: true, 716: true, 717: true, 718: true, 719: true, 721: true, 810: true, 911: true, 999: true,
}

// Sticky reports whether every later call of the process will fail, too.
func (e *Error) Sticky() bool { return sticky[e.Code] }

func check(call string, code int) error {
	if code == 0 {
		return nil
	}
	return &Error{Call: call, Code: code}
}

// of makes an Error from one of cu's, whose type is not exported.
func of(call string, err error) error {
	if err == nil {
		return nil
	}
	for inner := err; inner != nil; inner = errors.Unwrap(inner) { // some of them are wrapped
		if v := reflect.ValueOf(inner); v.Kind() == reflect.Int {
			return &Error{Call: call, Code: int(v.Int())}
		}
	}
	return fmt.Errorf("%s: %w", call, err)
}

// Package pagefault runs code that touches mapped memory, and turns a page that cannot be read
// into an error.
//
// The kernel sends SIGBUS for a page whose memory is broken, that was truncated from its file, or
// for which its file system has no room. A Go process dies of it unless the goroutine has asked
// for a panic instead. That works for loads, stores and the assembler of copy and of checksums,
// but not for C: a driver's accesses in C are unguarded. System calls get EFAULT.
package pagefault

import (
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"unsafe"
)

// Error is a page that could not be read or written.
type Error struct {
	Addr uintptr // the kernel's: for broken memory the beginning of the page at times, else the byte
}

func (e *Error) Error() string { return fmt.Sprintf("memory went away at %#x", e.Addr) }

// Guard runs f, which touches the mappings a and b and nothing else that can fault. A fault in
// them ends f and becomes the error; other panics pass through. f must hold no lock, and must
// leave no count wrong when a fault ends it midway.
func Guard(a, b []byte, f func()) (err error) {
	before := debug.SetPanicOnFault(true)
	defer func() { // one for both: this is on the path of each block
		debug.SetPanicOnFault(before)
		if r := recover(); r != nil {
			err = faultIn(r, a, b)
		}
	}()
	f()
	return nil
}

// faultIn returns the error of a fault at an address in a or b, and panics again with any other
// r.
func faultIn(r any, a, b []byte) error {
	fault, ok := r.(interface{ Addr() uintptr })
	if !ok || !within(fault.Addr(), a) && !within(fault.Addr(), b) {
		panic(r)
	}
	return &Error{Addr: fault.Addr()}
}

func within(addr uintptr, mem []byte) bool {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	return addr >= start && addr-start < uintptr(len(mem))
}

// Readable reports whether the page of the byte at off of mem can be read.
func Readable(mem []byte, off int64) bool {
	return Guard(mem, nil, func() {
		touched.Store(uint32(mem[off])) // stored, so that the load stays
	}) == nil
}

// touched is only written, by Readable.
var touched atomic.Uint32

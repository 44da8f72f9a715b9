// Package pagefault runs code that touches mapped memory, and makes an error of a page there that
// cannot be had.
//
// The kernel sends SIGBUS for a page whose memory is broken, that was cut off its file, or for
// which its file system has no room. A Go process dies of it unless the goroutine asked for a panic
// instead. That works for loads, stores and the assembler of copy and of checksums, not for C: what
// a driver does in C it does unguarded. System calls are given EFAULT.
package pagefault

import (
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"unsafe"
)

// Error is a page that could not be had.
type Error struct {
	Addr uintptr // the kernel's: for broken memory the beginning of the page at times, else the byte
}

func (e *Error) Error() string { return fmt.Sprintf("memory went away at %#x", e.Addr) }

// Guard runs f, which touches the mappings a and b and nothing else that can fault. A fault in them
// ends f and is the error; any other panics as ever. f must hold no lock and count nothing that a
// fault in its middle would leave wrong.
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

// faultIn panics again unless r is a fault at an address in a or b.
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

// touched is written by Readable and read by nobody.
var touched atomic.Uint32

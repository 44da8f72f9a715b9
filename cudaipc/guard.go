package cudaipc

import (
	"fmt"
	"runtime/debug"
	"unsafe"
)

// guarded runs f, which touches the mappings a and b and nothing else that can fault. A fault in them becomes an
// error. It is what protects this process from a peer that cuts off its file under our mapping, or of whose file
// no page can be had: the kernel's SIGBUS then ends the copy, not the agent. Requiring a seal against shrinking
// instead would leave the second case, and memory that comes from libraries that do not seal.
func guarded(a, b []byte, f func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
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
	if !ok || !(within(fault.Addr(), a) || within(fault.Addr(), b)) {
		panic(r)
	}
	return fmt.Errorf("memory went away at %#x", fault.Addr())
}

func within(addr uintptr, mem []byte) bool {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	return addr >= start && addr-start < uintptr(len(mem))
}

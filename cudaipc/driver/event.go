//go:build cuda

package driver

/*
#include <cuda.h>
#include <string.h>

static CUresult kvdrv_event_open(CUevent *e, const void *bytes) {
	CUipcEventHandle h;
	memcpy(&h, bytes, sizeof h);
	return cuIpcOpenEventHandle(e, h);
}
*/
import "C"

import (
	"unsafe"

	"gorgonia.org/cu"
)

// Event is an event of this process, or one that it has opened.
type Event struct{ e cu.Event }

// cu.Event is one handle and nothing else.
var (
	_ [unsafe.Sizeof(cu.Event{}) - unsafe.Sizeof(C.CUevent(nil))]struct{}
	_ [unsafe.Sizeof(C.CUevent(nil)) - unsafe.Sizeof(cu.Event{})]struct{}
)

func (e Event) handle() C.CUevent { return *(*C.CUevent)(unsafe.Pointer(&e.e)) }

// NewEvent makes an event without timing. A shared one can be exported.
func NewEvent(shared bool) (Event, error) {
	flags := cu.DisableTiming
	if shared {
		flags |= cu.InterprocessEvent
	}
	e, err := cu.MakeEvent(flags)
	return Event{e}, of("cuEventCreate", err)
}

// Export makes the handle of a shared event.
func (e Event) Export() (h Handle, err error) {
	var c C.CUipcEventHandle
	err = check("cuIpcGetEventHandle", int(C.cuIpcGetEventHandle(&c, e.handle())))
	return *(*Handle)(unsafe.Pointer(&c)), err
}

// OpenEvent opens another process's event.
func OpenEvent(h *Handle) (Event, error) {
	var c C.CUevent
	err := check("cuIpcOpenEventHandle", int(C.kvdrv_event_open(&c, unsafe.Pointer(h))))
	return Event{*(*cu.Event)(unsafe.Pointer(&c))}, err
}

// Record records the event after everything launched on the stream so far.
func (e Event) Record(s Stream) error { return of("cuEventRecord", e.e.Record(s.s)) }

// Fired reports whether the work before the event's record has ended.
func (e Event) Fired() (bool, error) {
	err := e.e.Query()
	if err == nil {
		return true, nil
	}
	if err == cu.NotReady { //nolint:errorlint // a CUresult, which nothing wraps
		return false, nil
	}
	return false, of("cuEventQuery", err)
}

// Destroy destroys the event here; an opened one stays valid in its own process.
func (e Event) Destroy() error { return of("cuEventDestroy", cu.DestroyEvent(&e.e)) }

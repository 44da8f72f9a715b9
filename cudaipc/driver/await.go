//go:build cuda

package driver

// #include <cuda.h>
import "C"

// AwaitEvent makes later work on the stream wait for the last record of the event; it does not
// wait if there is none. It is for engines only: a stream of a device would wait for ever for an
// event whose process died.
func (s Stream) AwaitEvent(e Event) error {
	return check("cuStreamWaitEvent", int(C.cuStreamWaitEvent(s.handle(), e.handle(), 0)))
}

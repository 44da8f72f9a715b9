//go:build cuda

package driver

// #include <cuda.h>
import "C"

// AwaitEvent lets what is launched on the stream from now on wait for what the event was last
// recorded behind; for nothing, if it was not. It is for engines: a stream of a device would stand
// for ever behind an event whose process died.
func (s Stream) AwaitEvent(e Event) error {
	return check("cuStreamWaitEvent", int(C.cuStreamWaitEvent(s.handle(), e.handle(), 0)))
}

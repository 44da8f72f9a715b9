package cudaipc

import "fmt"

// MaxLoadEvents is how many events a device records for one peer.
const MaxLoadEvents = 64

// Recorder is a device that records events of its own behind a peer's loads, so that a stream of the peer can wait for one without the
// peer's processor.
type Recorder interface {
	// LoadEvents makes count events, 1 to MaxLoadEvents, and gives their handles, CUDAEventCell bytes each, joined. off is where as many words of 8 bytes
	// are in the peer's sync region, aligned to 8. From then on a Scatter with a Serial is told: when its last call was started, event Serial % count is
	// recorded behind it, and then word Serial % count becomes Serial. Once for each import; ErrBusy if they are there already.
	LoadEvents(id PeerID, off uint64, count uint32) ([]byte, error)
}

// AskLoadEvents asks a device for load events, if it can make them.
func AskLoadEvents(d Device, id PeerID, off uint64, count uint32) ([]byte, error) {
	if r, ok := d.(Recorder); ok {
		return r.LoadEvents(id, off, count)
	}
	return nil, fmt.Errorf("peer %d: load events are of a GPU, and this is none: %w", id, ErrKind)
}

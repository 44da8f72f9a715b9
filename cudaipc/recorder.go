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

// checkLoadEvents holds the words of load events against the peer's sync region.
func (p *peer) checkLoadEvents(off uint64, count uint32) error {
	if count < 1 || count > MaxLoadEvents {
		return fmt.Errorf("peer %d: %d load events, allowed: 1 to %d: %w", p.id, count, MaxLoadEvents, ErrRange)
	}
	if size := uint64(len(p.words)); off%8 != 0 || off > size || uint64(count)*8 > size-off {
		return fmt.Errorf("peer %d: %d words of load events at %d of the sync region, which has %d bytes, aligned to 8: %w", p.id, count, off, size, ErrRange)
	}
	return nil
}

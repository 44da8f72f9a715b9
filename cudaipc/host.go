package cudaipc

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Limits of the host device.
const (
	MaxRegions   = 4096    // regions of one peer
	MaxPeerBytes = 1 << 43 // bytes of all regions of one peer; they take address space, not memory
	MaxCopies    = 1024    // copies of one peer that are under way or not asked for by Done
	MaxCopyRuns  = 1 << 20 // runs of one copy
)

// populatePiece is how many bytes are populated in one call. The kernel holds the address space's lock meanwhile: more
// would make every mmap of the process, the runtime's too, wait for milliseconds.
const populatePiece = 2 << 20

// HostOptions of a host device.
type HostOptions struct {
	ArenaFD   int   // a memfd of at least ArenaSize bytes; stays the caller's, may be closed after OpenHost
	ArenaSize int64 // bytes
	// FireOnDeath chooses what becomes of the events of a process that died: true, they fire; false, those that
	// have not fired never will. CUDA drivers have done both.
	FireOnDeath bool
	// Populate maps all of the arena's pages in the background, so that the first copy into a page does not
	// pay for it. It takes the memory.
	Populate bool
}

// Host is the device on shared memory. It maps its arena and the regions of its peers into this process, or
// reaches into theirs by process_vm_readv. A peer can do nothing to its memory that does more than make its own
// blocks bad: see guarded.
type Host struct {
	arena     []byte
	onDeath   bool
	populated chan struct{} // closed when the populating goroutine has ended
	stop      chan struct{} // closed to end it

	table
}

var _ Device = (*Host)(nil)

// OpenHost maps the arena. Close(AllPeers) frees everything.
func OpenHost(o HostOptions) (*Host, error) {
	arena, err := mapFD(o.ArenaFD, o.ArenaSize)
	if err != nil {
		return nil, fmt.Errorf("arena: %w", err)
	}
	h := &Host{arena: arena, onDeath: o.FireOnDeath, populated: make(chan struct{}), stop: make(chan struct{})}
	h.init()
	if o.Populate {
		go h.populate()
	} else {
		close(h.populated)
	}
	return h, nil
}

// populate gives up at the first refusal: pages are then mapped as they are touched.
func (h *Host) populate() {
	defer close(h.populated)
	for off := 0; off < len(h.arena); off += populatePiece {
		select {
		case <-h.stop:
			return
		default:
		}
		piece := h.arena[off:min(off+populatePiece, len(h.arena))]
		if unix.Madvise(piece, unix.MADV_POPULATE_WRITE) != nil {
			return
		}
	}
}

// Close closes a peer, or with AllPeers the device.
func (h *Host) Close(id PeerID) error {
	closing, err := h.take(id, false)
	for _, p := range closing {
		p.close()
	}
	if err != nil || id != AllPeers {
		return err
	}
	close(h.stop)
	<-h.populated
	return unmap(h.arena)
}

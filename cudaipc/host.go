package cudaipc

import (
	"fmt"
	"sync"

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

	mu struct {
		sync.RWMutex
		peers   map[PeerID]*peer
		tickets map[Ticket]*flight
		last    Ticket
		closed  bool
	}
}

var _ Device = (*Host)(nil)

// OpenHost maps the arena. Close(AllPeers) frees everything.
func OpenHost(o HostOptions) (*Host, error) {
	arena, err := mapFD(o.ArenaFD, o.ArenaSize)
	if err != nil {
		return nil, fmt.Errorf("arena: %w", err)
	}
	h := &Host{arena: arena, onDeath: o.FireOnDeath, populated: make(chan struct{}), stop: make(chan struct{})}
	h.mu.peers = map[PeerID]*peer{}
	h.mu.tickets = map[Ticket]*flight{}
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
	closing, err := h.take(id)
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

// take removes peers from the tables, all or none of those asked for. From then on nobody can reach them.
func (h *Host) take(id PeerID) ([]*peer, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.closed {
		return nil, errClosed
	}
	var closing []*peer
	for _, p := range h.mu.peers {
		if id != AllPeers && p.id != id {
			continue
		}
		if p.underWay.Load() > 0 {
			return nil, fmt.Errorf("peer %d: %w", p.id, ErrBusy)
		}
		closing = append(closing, p)
	}
	if id != AllPeers && closing == nil {
		return nil, fmt.Errorf("peer %d: %w", id, ErrPeer)
	}
	for _, p := range closing {
		delete(h.mu.peers, p.id)
		for t := range p.tickets {
			delete(h.mu.tickets, t)
		}
	}
	h.mu.closed = id == AllPeers
	return closing, nil
}

var errClosed = fmt.Errorf("device closed: %w", ErrPeer)

// peerLocked finds a peer; h.mu is held, for reading at least.
func (h *Host) peerLocked(id PeerID) (*peer, error) {
	if h.mu.closed {
		return nil, errClosed
	}
	p := h.mu.peers[id]
	if p == nil {
		return nil, fmt.Errorf("peer %d: %w", id, ErrPeer)
	}
	return p, nil
}

// Package host is the device on shared memory in place of a GPU's, with CUDA's rules.
package host

import (
	"fmt"
	"math"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// Options of a host device.
type Options struct {
	// Arena is mapped memory, which stays the caller's, and mapped until Close(AllPeers). If it is
	// nil, the device maps ArenaSize bytes of ArenaFD, which may be closed after Open.
	Arena     []byte
	ArenaFD   int
	ArenaSize int64
}

// Device is the device on shared memory. It maps the regions of its peers into this
// process, or reaches their memory by process_vm_readv. A peer that changes its memory can only
// make its own blocks bad: pagefault.Guard turns the SIGBUS of a file that was truncated under the
// mapping, or that has no page left, into the end of the copy. A seal against shrinking would not
// cover the second case, nor memory of libraries that do not seal.
type Device struct {
	arena    []byte
	ownArena bool // mapped here
	table    cudaipc.Table[*peer]
}

var _ cudaipc.Device = (*Device)(nil)

// Open maps the arena. Close(AllPeers) frees everything.
func Open(o Options) (*Device, error) {
	h := &Device{arena: o.Arena, ownArena: o.Arena == nil}
	if h.ownArena {
		var err error
		if h.arena, err = cudaipc.MapFD(o.ArenaFD, o.ArenaSize); err != nil {
			return nil, fmt.Errorf("arena: %w", err)
		}
	}
	h.table.Init()
	return h, nil
}

// Close closes a peer, or with AllPeers the device.
func (h *Device) Close(id cudaipc.PeerID) error {
	closing, err := h.table.Take(id, false)
	for _, p := range closing {
		p.close()
	}
	if err != nil || id != cudaipc.AllPeers || !h.ownArena {
		return err
	}
	return cudaipc.Unmap(h.arena)
}

// Poll answers a wait now.
func (h *Device) Poll(w cudaipc.Wait) (cudaipc.State, error) {
	h.table.RLock()
	defer h.table.RUnlock()
	p, err := h.table.PeerLocked(w.Peer)
	if err != nil {
		return cudaipc.State{}, err
	}
	return p.Poll(&w)
}

// SetWord writes a word of a peer's sync region.
func (h *Device) SetWord(id cudaipc.PeerID, off, value uint64) error {
	return h.table.SetWord(id, off, value)
}

// Copy checks a copy and puts it into its stream.
func (h *Device) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	return h.table.Copy(c, int64(len(h.arena)), func(p *peer, f *cudaipc.Flight) {
		if p.streams[c.Dir] == nil {
			p.streams[c.Dir] = startStream(p, h.arena)
		}
		p.streams[c.Dir].work <- f
	})
}

// Done waits for a copy. With timeout 0 or less it does not wait.
func (h *Device) Done(t cudaipc.Ticket, timeout time.Duration) (cudaipc.Done, bool, error) {
	return h.table.Done(t, timeout)
}

// peer is a peer of the host device, with its goroutines, which the device's lock guards.
type peer struct {
	cudaipc.Peer
	streams [2]*queue // by Direction, nil until the first copy
	sampler *queue    // nil until the first sample
}

// Import opens the regions of a peer, all or none, and closes every descriptor.
func (h *Device) Import(im cudaipc.Import) error {
	defer im.CloseRegions()
	p := &peer{}
	err := p.Prepare(&im)
	p.Proof = im.Proof
	if err == nil {
		err = p.open(&im)
	}
	if err == nil {
		err = h.table.Add(p)
	}
	if err != nil {
		p.close()
		return fmt.Errorf("peer %d: %w", im.Peer, err)
	}
	return nil
}

func (p *peer) open(im *cudaipc.Import) error {
	watch := false
	for i := range im.Regions {
		r := &im.Regions[i]
		opened, err := openRegion(r, im.Pid)
		if err != nil {
			return fmt.Errorf("region %d: %w", r.ID, err)
		}
		p.Regions[r.ID] = opened
		watch = watch || r.Kind == cudaipc.KindPeer
	}
	if err := p.PlaceWords(im.Sync, cudaipc.EventCell); err != nil {
		return err
	}
	if watch && im.Pid > 0 {
		return p.Watch()
	}
	return nil
}

// close ends the idle streams and unmaps. No call reaches the peer any more.
func (p *peer) close() {
	for _, s := range p.streams {
		s.close()
	}
	p.sampler.close()
	p.Peer.Close()
}

// openRegion opens one region. The caller closes the descriptor.
func openRegion(r *cudaipc.Region, pid int) (*cudaipc.Opened, error) {
	switch r.Kind {
	case cudaipc.KindFD:
		mem, err := cudaipc.MapFD(r.FD, int64(r.Size))
		return &cudaipc.Opened{Size: r.Size, Mem: mem}, err
	case cudaipc.KindPeer:
		if pid <= 0 {
			return nil, fmt.Errorf("the peer's process is not known (share the PID namespace): %w", cudaipc.ErrKind)
		}
		if r.Addr > math.MaxInt64 || r.Addr+r.Size > math.MaxInt64 {
			return nil, fmt.Errorf("address %#x and size %d: %w", r.Addr, r.Size, cudaipc.ErrRange)
		}
		return &cudaipc.Opened{Size: r.Size, Addr: r.Addr}, nil
	}
	return nil, fmt.Errorf("kind %d on the host device: %w", r.Kind, cudaipc.ErrKind)
}

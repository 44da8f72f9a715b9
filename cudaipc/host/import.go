package host

import (
	"fmt"
	"math"

	"github.com/kvagent/kvagent/cudaipc"
)

// peer is a peer of the host device, with the goroutines that copy for it. The device's lock
// guards them.
type peer struct {
	cudaipc.Peer
	streams [2]*stream // by Direction, nil until the first copy
	sampler *sampler   // nil until the first sample
}

// Import opens the regions of a peer, all or none. It closes every descriptor: a mapping keeps
// its file.
func (h *Device) Import(im cudaipc.Import) error {
	defer im.CloseRegions()
	p := &peer{}
	p.Prepare(&im)
	p.Proof, p.FireOnDeath = im.Proof, h.onDeath
	err := p.open(&im)
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
	if len(im.Regions) > cudaipc.MaxRegions {
		return fmt.Errorf("%d regions, at most %d: %w", len(im.Regions), cudaipc.MaxRegions, cudaipc.ErrRange)
	}
	watch := p.FireOnDeath
	var total uint64
	for i := range im.Regions {
		r := &im.Regions[i]
		if p.Regions[r.ID] != nil {
			return fmt.Errorf("region %d is there twice: %w", r.ID, cudaipc.ErrRange)
		}
		if err := im.CheckCancelled(); err != nil {
			return err
		}
		opened, err := openRegion(r, im.Pid)
		if err != nil {
			return fmt.Errorf("region %d: %w", r.ID, err)
		}
		p.Regions[r.ID] = opened
		if total += r.Size; total > cudaipc.MaxPeerBytes {
			return fmt.Errorf("region %d: more than %d bytes in all: %w", r.ID, int64(cudaipc.MaxPeerBytes),
				cudaipc.ErrRange)
		}
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
		if s != nil {
			s.close()
		}
	}
	p.sampler.close()
	p.Peer.Close()
}

// openRegion opens one region. The caller closes the descriptor.
func openRegion(r *cudaipc.Region, pid int) (*cudaipc.Opened, error) {
	if r.Size == 0 || r.Size > cudaipc.MaxPeerBytes {
		return nil, fmt.Errorf("size %d is not within 1 and %d bytes: %w", r.Size, int64(cudaipc.MaxPeerBytes),
			cudaipc.ErrRange)
	}
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

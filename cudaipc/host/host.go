// Package host is the device on shared memory in place of a GPU's, with CUDA's rules.
package host

import (
	"fmt"
	"math"

	"github.com/kvagent/kvagent/cudaipc"
)

// Device is the device on shared memory. It maps the regions of its peers into this
// process, or reaches their memory by process_vm_readv. A peer that changes its memory can only
// make its own blocks bad: pagefault.Guard turns the SIGBUS of a file that was truncated under the
// mapping, or that has no page left, into the end of the copy. A seal against shrinking would not
// cover the second case, nor memory of libraries that do not seal.
type Device struct {
	arena []byte
	peers cudaipc.Peers
}

var _ cudaipc.Device = (*Device)(nil)

// Open returns the device of an arena, mapped memory that stays the caller's.
func Open(arena []byte) *Device { return &Device{arena: arena} }

// Close ends the device: the arena is not touched any more.
func (h *Device) Close() error { return h.peers.Close() }

// peer is a peer of the host device, with its goroutines.
type peer struct {
	cudaipc.Base
	of      *Device
	streams [2]*queue // by Direction
	sampler *queue
}

// Import opens the regions of a peer, all or none, and closes every descriptor.
func (h *Device) Import(im cudaipc.Import) (cudaipc.Peer, error) {
	defer im.CloseRegions()
	p := &peer{of: h}
	err := p.Prepare(&im)
	p.Proof = im.Proof
	if err == nil {
		err = h.peers.Enter()
	}
	if err == nil {
		if err = p.open(&im); err == nil {
			p.start()
			return p, nil
		}
		h.peers.Leave()
	}
	p.Unmap()
	return nil, err
}

// Copy checks a copy and puts it into its stream.
func (p *peer) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	return p.StartCopy(c, int64(len(p.of.arena)), func(f *cudaipc.Flight) error {
		return p.streams[c.Dir].put(f)
	})
}

// Sum checks a sample and hands it to the sampler.
func (p *peer) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	return p.StartSum(s, p.sampler.put)
}

// Close ends the idle streams and unmaps.
func (p *peer) Close() error {
	if err := p.Shut(false); err != nil {
		return err
	}
	for _, q := range []*queue{p.streams[0], p.streams[1], p.sampler} {
		q.close()
	}
	p.Unmap()
	p.of.peers.Leave()
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

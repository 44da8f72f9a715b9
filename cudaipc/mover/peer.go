package mover

import (
	"fmt"

	"github.com/kvagent/kvagent/cudaipc"
)

// peer is a peer whose regions are open in a mover. Here it has the sizes of the regions, to check
// runs by, and the mapped sync words.
type peer struct {
	cudaipc.Base
	asks    bool        // its events are asked in the mover
	lost    func(error) // Import.Lost
	process *process
	number  uint64      // in its process: that of the import's request
	lanes   [lanes]lane // under Mover.mu
}

// Import opens the regions of a peer in the mover, all or none.
func (m *Mover) Import(im cudaipc.Import) (cudaipc.Peer, error) {
	defer im.CloseAll()
	p := &peer{asks: m.opts.AskEvents || im.OnGPU(), lost: im.Lost}
	err := m.peers.Enter()
	if err != nil {
		return nil, err
	}
	if err = p.Prepare(&im); err == nil {
		err = viewRegions(&p.Base, &im)
	}
	if err == nil && im.Pid > 0 {
		_ = p.Watch() // the device reports a process that is not there
	}
	if err == nil {
		p.process, err = m.aliveFor(&im)
	}
	if err == nil {
		err = p.process.importPeer(p, &im)
	}
	if err == nil {
		if err = im.CheckCancelled(); err == nil {
			err = p.process.add(p)
		}
		if err != nil {
			p.process.release(p.number)
		}
	}
	if err != nil {
		p.Unmap()
		m.peers.Leave()
		return nil, err
	}
	return p, nil
}

// add enters a peer, unless its process has ended.
func (p *process) add(one *peer) error {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	if p.over {
		return p.err()
	}
	p.peers[one] = struct{}{}
	return nil
}

// Close closes a peer. It is not told any more that its process was lost.
func (p *peer) Close() error {
	if err := p.Shut(false); err != nil {
		return err
	}
	m := p.process.m
	m.mu.Lock()
	delete(p.process.peers, p)
	m.mu.Unlock()
	p.process.release(p.number)
	p.Unmap()
	m.peers.Leave()
	return nil
}

// viewRegions notes the sizes of a peer's regions, and maps the one that its words are in.
func viewRegions(p *cudaipc.Base, im *cudaipc.Import) error {
	cell := uint64(cudaipc.EventCell)
	if im.OnGPU() {
		cell = cudaipc.CUDAEventCell
	}
	for i := range im.Regions {
		r := &im.Regions[i]
		if have := p.Regions[r.ID]; have != nil {
			have.Size += r.Size // a further piece
			continue
		}
		p.Regions[r.ID] = &cudaipc.Opened{Size: r.Size}
		if s := im.Sync; s == nil || *s == (cudaipc.Sync{}) || s.Region != r.ID || r.Kind != cudaipc.KindFD {
			continue
		}
		mem, err := cudaipc.MapFD(r.FD, int64(r.Size))
		if err != nil {
			return fmt.Errorf("region %d: %w", r.ID, err)
		}
		p.Regions[r.ID].Mem = mem
	}
	return p.PlaceWords(im.Sync, cell)
}

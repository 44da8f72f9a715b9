package mover

import (
	"fmt"

	"github.com/kvagent/kvagent/cudaipc"
)

// peer is a peer whose regions are open in a mover. Here it has the sizes of the regions, to check
// runs by, and the mapped sync words.
type peer struct {
	cudaipc.Peer
	asks    bool        // its events are asked in the mover
	lost    func(error) // Import.Lost
	process *process
	lanes   [lanes]lane
}

// Import opens the regions of a peer in the mover, all or none.
func (m *Mover) Import(im cudaipc.Import) error {
	defer im.CloseAll()
	p := &peer{asks: m.opts.AskEvents || im.OnGPU(), lost: im.Lost}
	err := p.Prepare(&im)
	if err == nil {
		err = viewRegions(&p.Peer, &im)
	}
	if err == nil && im.Pid > 0 {
		_ = p.Watch() // the device reports a process that is not there
	}
	if err == nil {
		p.process, err = m.aliveFor(&im)
	}
	if err == nil {
		err = p.process.importPeer(&im)
	}
	if err == nil {
		if err = im.CheckCancelled(); err == nil {
			err = m.add(p)
		}
		if err != nil {
			p.process.release(im.Peer)
		}
	}
	if err != nil {
		p.Close()
	}
	return err
}

// add enters a peer, unless its process has ended.
func (m *Mover) add(p *peer) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p.process.over {
		return p.process.err()
	}
	return m.table.Add(p)
}

// viewRegions notes the sizes of a peer's regions, and maps the one that its words are in.
func viewRegions(p *cudaipc.Peer, im *cudaipc.Import) error {
	cell := uint64(cudaipc.EventCell)
	if im.OnGPU() {
		cell = cudaipc.CUDAEventCell
	}
	for i := range im.Regions {
		r := &im.Regions[i]
		if len(r.Handle) > maxHandle {
			return fmt.Errorf("region %d: handle of %d bytes, at most %d: %w", r.ID, len(r.Handle), maxHandle,
				cudaipc.ErrRange)
		}
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

package proof

import (
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
)

// playAgent opens the GPU as an agent's mover does, imports what its order names, and copies
// until it is killed.
func playAgent(first *order, fds []int) error {
	arena, device, err := openAgent(first, fds)
	if err != nil {
		return send(controlFD, &answer{Err: err.Error()})
	}
	defer arena.close()
	if err := send(controlFD, &answer{}); err != nil {
		return err
	}
	for {
		var o order
		if _, err := receive(controlFD, &o); err != nil {
			return nil // the parent has what it wanted
		}
		if err := send(controlFD, &answer{}); err != nil {
			return err
		}
		if o.Op == opCopy {
			return copyForEver(device, first.Import.Peer, o.Region, o.Len)
		}
	}
}

func openAgent(o *order, fds []int) (*arena, *cuda.Device, error) {
	a, err := newArena(o.Sizes[0], false)
	if err != nil {
		return nil, nil, err
	}
	d, err := cuda.Open(cuda.Options{Arena: a.mem})
	if err != nil || o.Import == nil {
		return a, d, err
	}
	im, next := *o.Import, 0
	for i := range im.Regions {
		if withFD(&im.Regions[i]) {
			im.Regions[i].FD = fds[next]
			next++
		}
	}
	return a, d, d.Import(im)
}

// copyForEver gathers, and never writes to the engine's memory.
func copyForEver(d *cuda.Device, peer cudaipc.PeerID, region cudaipc.RegionID, n int64) error {
	for {
		t, err := d.Copy(&cudaipc.Copy{
			Peer: peer, Dir: cudaipc.Gather, Runs: []cudaipc.Run{{Region: region, Len: uint32(n)}},
			Blocks: []cudaipc.Block{{Runs: 1}},
		})
		if err != nil {
			return err
		}
		if _, _, err := d.Done(t, copyWithin); err != nil {
			return err
		}
	}
}

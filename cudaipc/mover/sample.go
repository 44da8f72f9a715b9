package mover

import (
	"fmt"

	"github.com/kvagent/kvagent/cudaipc"
)

// sumWay is the place of samples beside the two directions of copies, in what is kept for each of
// the three.
const (
	sumWay = 2
	ways   = 3
)

var _ cudaipc.Summer = (*Mover)(nil)

// Sum checks a sample and sends it to the mover.
func (m *Mover) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	p, err := m.beginCopy(s.Peer)
	if err != nil {
		return 0, err
	}
	if err := p.view.CheckSample(s); err != nil {
		p.view.Release()
		return 0, fmt.Errorf("peer %d: %w", s.Peer, err)
	}
	t, err := m.ticket(&movedCopy{of: p, way: sumWay, blocks: len(s.Blocks), sum: true})
	if err != nil {
		p.view.Release()
		return 0, err
	}
	_ = p.life.post("sample", putSample(nil, t, s), nil) // if it fails the life ends, and the sample with it
	return t, nil
}

// sum puts a sample into its lane.
func (s *server) sum(f *fields, t cudaipc.Ticket) error {
	sample, err := takeSample(f)
	if err != nil {
		return err
	}
	return s.enqueue(sample.Peer, sumWay, &laneCopy{
		ticket: t, sample: sample,
		copy: cudaipc.Copy{Peer: sample.Peer, Sum: true, Blocks: make([]cudaipc.Block, len(sample.Blocks))}, // what it is to allBad
	})
}

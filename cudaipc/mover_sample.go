package cudaipc

import "fmt"

// sumWay is the place of samples beside the two directions of copies, in what is kept for each of
// the three.
const (
	sumWay = 2
	ways   = 3
)

var _ Summer = (*Mover)(nil)

// Sum checks a sample and sends it to the mover.
func (m *Mover) Sum(s *Sample) (Ticket, error) {
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
func (s *moverServer) sum(f *fields, t Ticket) error {
	sample, err := takeSample(f)
	if err != nil {
		return err
	}
	return s.enqueue(sample.Peer, sumWay, &laneCopy{
		ticket: t, sample: sample,
		copy: Copy{Peer: sample.Peer, Sum: true, Blocks: make([]Block, len(sample.Blocks))}, // what it is to allBad
	})
}

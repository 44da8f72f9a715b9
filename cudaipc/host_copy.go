package cudaipc

import "fmt"

// Copy checks a copy and puts it into its stream.
func (h *Host) Copy(c *Copy) (Ticket, error) {
	p, err := h.begin(c.Peer)
	if err != nil {
		return 0, err
	}
	if err := p.checkCopy(c, len(h.arena)); err != nil {
		p.underWay.Add(-1)
		return 0, fmt.Errorf("peer %d: %w", p.id, err)
	}
	return h.enter(p, c, func(f *flight) {
		if p.streams[c.Dir] == nil {
			p.streams[c.Dir] = startStream(h.arena)
		}
		p.streams[c.Dir].work <- f // has room for MaxCopies
	})
}

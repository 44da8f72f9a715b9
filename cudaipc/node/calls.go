package node

import (
	"fmt"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// Poll asks the devices of the peers, with one call for neighbours on one device.
func (n *Node) Poll(waits []cudaipc.Wait, states []cudaipc.State) error {
	for i := 0; i < len(waits); {
		d, err := n.device(waits[i].Peer)
		if err != nil {
			return err
		}
		from := i
		for i++; i < len(waits); i++ {
			if next, _ := n.device(waits[i].Peer); next != d {
				break
			}
		}
		if err := d.Poll(waits[from:i], states[from:i]); err != nil {
			return err
		}
	}
	return nil
}

// Copy starts a copy on the peer's device.
func (n *Node) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	d, err := n.device(c.Peer)
	if err != nil {
		return 0, err
	}
	t, err := d.Copy(c)
	return t | cudaipc.Ticket(d.place)<<placeShift, err
}

// Done asks the device that gave the ticket.
func (n *Node) Done(t cudaipc.Ticket, timeout time.Duration) (cudaipc.Done, bool, error) {
	n.mu.RLock()
	var d *device
	if place := int(t >> placeShift); place < len(n.mu.devices) {
		d = n.mu.devices[place]
	}
	n.mu.RUnlock()
	if d == nil {
		return cudaipc.Done{}, false, fmt.Errorf("ticket %d: %w", t, cudaipc.ErrTicket)
	}
	return d.Done(t&(1<<placeShift-1), timeout)
}

// Movers returns the states of those devices that run in processes of their own.
func (n *Node) Movers() []cudaipc.MoverState {
	all := []cudaipc.MoverState{}
	n.mu.RLock()
	devices := append([]*device(nil), n.mu.devices...)
	n.mu.RUnlock()
	for _, d := range devices {
		if d == nil {
			continue
		}
		if m, ok := d.Device.(interface{ Movers() []cudaipc.MoverState }); ok {
			all = append(all, m.Movers()...)
		}
	}
	return all
}

// Sum starts a sample on the peer's device.
func (n *Node) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	d, err := n.device(s.Peer)
	if err != nil {
		return 0, err
	}
	t, err := d.Sum(s)
	return t | cudaipc.Ticket(d.place)<<placeShift, err
}

// SetWord calls SetWord of the peer's device.
func (n *Node) SetWord(id cudaipc.PeerID, off, value uint64) error {
	d, err := n.device(id)
	if err != nil {
		return err
	}
	return d.SetWord(id, off, value)
}

package cudaipc

import (
	"fmt"
	"time"
)

// Poll asks the devices of the peers: one call for neighbours on one device.
func (n *Node) Poll(waits []Wait, states []State) error {
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
func (n *Node) Copy(c *Copy) (Ticket, error) {
	d, err := n.device(c.Peer)
	if err != nil {
		return 0, err
	}
	t, err := d.Copy(c)
	return t | Ticket(d.place)<<nodeShift, err
}

// Done asks the device that gave the ticket.
func (n *Node) Done(t Ticket, timeout time.Duration) (Done, bool, error) {
	n.mu.RLock()
	var d *nodeDevice
	if place := int(t >> nodeShift); place < len(n.mu.devices) {
		d = n.mu.devices[place]
	}
	n.mu.RUnlock()
	if d == nil {
		return Done{}, false, fmt.Errorf("ticket %d: %w", t, ErrTicket)
	}
	return d.Done(t&(1<<nodeShift-1), timeout)
}

// Movers are the states of those devices that are in processes of their own.
func (n *Node) Movers() (all []MoverState) {
	n.mu.RLock()
	devices := append([]*nodeDevice(nil), n.mu.devices...)
	n.mu.RUnlock()
	for _, d := range devices {
		if d == nil {
			continue
		}
		if m, ok := d.Device.(interface{ Movers() []MoverState }); ok {
			all = append(all, m.Movers()...)
		}
	}
	return all
}

// Sum starts a sample on the peer's device.
func (n *Node) Sum(s *Sample) (Ticket, error) {
	d, err := n.device(s.Peer)
	if err != nil {
		return 0, err
	}
	t, err := StartSum(d.Device, s)
	return t | Ticket(d.place)<<nodeShift, err
}

// LoadEvents asks the device that has the peer.
func (n *Node) LoadEvents(id PeerID, off uint64, count uint32) ([]byte, error) {
	d, err := n.device(id)
	if err != nil {
		return nil, err
	}
	return AskLoadEvents(d.Device, id, off, count)
}

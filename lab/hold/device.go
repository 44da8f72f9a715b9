package hold

import (
	"sync"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/host"
)

// heldBit marks the tickets of copies that were held.
const heldBit = cudaipc.Ticket(1) << 63

// device is a host device whose loads can be held back: their copies wait between submission and
// start. Copies of one peer keep their order, because all later ones are held too.
type device struct {
	*host.Device
	told func() // called when the first copy is held, with mu held

	mu       sync.Mutex
	pass     int           // copies that still pass; below 0: all
	released chan struct{} // closed by release
	waiting  []heldCopy
	started  map[cudaipc.Ticket]cudaipc.Ticket // by the held copy's
	last     cudaipc.Ticket
}

type heldCopy struct {
	ticket cudaipc.Ticket
	copy   *cudaipc.Copy
}

func newDevice(d *host.Device, told func()) *device {
	return &device{Device: d, told: told, pass: -1, started: map[cudaipc.Ticket]cudaipc.Ticket{}}
}

// hold lets the next copies of loads pass, and holds those after them until release.
func (d *device) hold(pass int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pass, d.released = pass, make(chan struct{})
}

// release starts the held copies, and holds none any more.
func (d *device) release() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, h := range d.waiting {
		t, err := d.Device.Copy(h.copy)
		if err != nil {
			return err
		}
		d.started[h.ticket] = t
	}
	d.waiting, d.pass = nil, -1
	if d.released != nil {
		close(d.released)
		d.released = nil
	}
	return nil
}

// Copy implements cudaipc.Device.
func (d *device) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.Dir != cudaipc.Scatter || d.pass < 0 {
		return d.Device.Copy(c)
	}
	if d.pass > 0 {
		d.pass--
		return d.Device.Copy(c)
	}
	if len(d.waiting) == 0 {
		d.told()
	}
	d.last++
	d.waiting = append(d.waiting, heldCopy{d.last | heldBit, c})
	return d.last | heldBit, nil
}

// Done implements cudaipc.Device.
func (d *device) Done(t cudaipc.Ticket, timeout time.Duration) (cudaipc.Done, bool, error) {
	if t&heldBit == 0 {
		return d.Device.Done(t, timeout)
	}
	d.mu.Lock()
	started, ok := d.started[t]
	released := d.released
	d.mu.Unlock()
	if ok {
		return d.Device.Done(started, timeout)
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-released:
	case <-timer.C:
	}
	return cudaipc.Done{}, false, nil
}

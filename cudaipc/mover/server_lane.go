package mover

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// laneWait is how long one call waits for a copy; then it waits again. Any value does.
const laneWait = time.Minute

// lane passes the copies of one peer and direction to the device in their order, and reports
// their ends in that order, which is the one in which they end. One goroutine submits and one
// waits, so that the device always has the next copy. Closing submit ends both, after the last
// copy.
type lane struct {
	submit chan *laneCopy // room for MaxCopies: the agent has no more in flight
	begun  chan *laneCopy
}

type laneCopy struct {
	copy   cudaipc.Copy
	sample *cudaipc.Sample // nil: it is a copy
	ticket cudaipc.Ticket  // the agent's
	device cudaipc.Ticket
	err    error // of its submission
}

// copies are ended ones, for their memory: a copy has thousands of runs.
var copies = sync.Pool{New: func() any { return &laneCopy{} }}

// copy puts a copy into its lane.
func (s *server) copy(f *fields, t cudaipc.Ticket) error {
	c, _ := copies.Get().(*laneCopy)
	c.ticket = t
	if err := takeCopy(f, &c.copy); err != nil {
		return err
	}
	if c.copy.Dir != cudaipc.Gather && c.copy.Dir != cudaipc.Scatter {
		return fmt.Errorf("direction %d: %w", c.copy.Dir, errWire)
	}
	return s.enqueue(c.copy.Peer, int(c.copy.Dir), c)
}

// enqueue puts a copy, or a sample, into a lane of its peer.
func (s *server) enqueue(id cudaipc.PeerID, lane int, c *laneCopy) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.mu.peers[id]
	if p == nil {
		c.err = fmt.Errorf("peer %d: %w", id, cudaipc.ErrPeer)
		s.running.Go(func() { s.done(c, cudaipc.Done{}) })
		return nil
	}
	l := p.lanes[lane]
	if l == nil {
		l = s.startLane(s.mu.device)
		p.lanes[lane] = l
	}
	select {
	case l.submit <- c:
		return nil
	default:
		return fmt.Errorf("peer %d: more than %d copies in flight: %w", p.id, cudaipc.MaxCopies, errWire)
	}
}

func (s *server) startLane(d cudaipc.Device) *lane {
	l := &lane{submit: make(chan *laneCopy, cudaipc.MaxCopies), begun: make(chan *laneCopy, cudaipc.MaxCopies)}
	s.running.Go(func() {
		defer close(l.begun)
		for c := range l.submit {
			c.device, c.err = c.start(d)
			l.begun <- c
		}
	})
	s.running.Go(func() {
		for c := range l.begun {
			s.done(c, l.wait(d, c))
			if c.sample == nil && c.err == nil { // else the device may still have it
				copies.Put(c)
			}
		}
	})
	return l
}

func (c *laneCopy) start(d cudaipc.Device) (cudaipc.Ticket, error) {
	if c.sample != nil {
		return d.Sum(c.sample)
	}
	return d.Copy(&c.copy)
}

// wait waits for the end of a copy without a limit; the agent has one.
func (l *lane) wait(d cudaipc.Device, c *laneCopy) cudaipc.Done {
	for c.err == nil {
		end, ok, err := d.Done(c.device, laneWait)
		if ok {
			return end
		}
		c.err = err
	}
	return cudaipc.Done{}
}

// done reports the end of a copy. A copy that the device refused has only bad blocks.
func (s *server) done(c *laneCopy, d cudaipc.Done) {
	if s.lost(c.err) || s.lost(d.Err) {
		return
	}
	if c.err != nil {
		d = allBad(&c.copy, c.err)
	}
	_ = s.send(putDone(nil, c.ticket, &d)) // as in answer
}

// allBad returns the end of a copy of which nothing arrived.
func allBad(c *cudaipc.Copy, err error) cudaipc.Done {
	d := cudaipc.Done{Err: err, Bad: make([]bool, len(c.Blocks))}
	for i := range d.Bad {
		d.Bad[i] = true
	}
	if c.Sum {
		d.Sums = make([]uint32, len(c.Blocks))
	}
	return d
}

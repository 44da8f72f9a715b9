package cudaipc

import (
	"fmt"
	"time"
)

// laneWait is how long the mover waits for a copy in one call; then it waits again. Any value does.
const laneWait = time.Minute

// moverLane brings the copies of one peer and direction to the device in their order, and tells their ends in that order
// too, which is the one in which they end. Two goroutines, so that the device always has the next copy: one submits, one
// waits. Closing submit ends both, behind the last copy.
type moverLane struct {
	submit chan *laneCopy // room for MaxCopies: the agent has no more under way
	begun  chan *laneCopy
}

type laneCopy struct {
	copy   Copy
	sample *Sample // nil: it is a copy
	ticket Ticket  // the agent's
	device Ticket
	err    error // of its submission
}

// copy puts a copy into its lane.
func (s *moverServer) copy(f *fields, t Ticket) error {
	c := &laneCopy{ticket: t}
	if err := takeCopy(f, &c.copy); err != nil {
		return err
	}
	if c.copy.Dir != Gather && c.copy.Dir != Scatter {
		return fmt.Errorf("direction %d: %w", c.copy.Dir, errMoverWire)
	}
	return s.enqueue(c.copy.Peer, int(c.copy.Dir), c)
}

// enqueue puts a copy, or a sample, into a lane of its peer.
func (s *moverServer) enqueue(id PeerID, way int, c *laneCopy) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.mu.peers[id]
	if p == nil {
		c.err = fmt.Errorf("peer %d: %w", id, ErrPeer)
		s.running.Go(func() { s.done(c, Done{}) })
		return nil
	}
	l := p.lanes[way]
	if l == nil {
		l = s.startLane(s.mu.device)
		p.lanes[way] = l
	}
	select {
	case l.submit <- c:
		return nil
	default:
		return fmt.Errorf("peer %d: more than %d copies under way: %w", p.id, MaxCopies, errMoverWire)
	}
}

func (s *moverServer) startLane(d Device) *moverLane {
	l := &moverLane{submit: make(chan *laneCopy, MaxCopies), begun: make(chan *laneCopy, MaxCopies)}
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
		}
	})
	return l
}

func (c *laneCopy) start(d Device) (Ticket, error) {
	if c.sample != nil {
		return StartSum(d, c.sample)
	}
	return d.Copy(&c.copy)
}

// wait waits for the end of a copy, however long that takes: the agent knows when it is too long.
func (l *moverLane) wait(d Device, c *laneCopy) Done {
	for c.err == nil {
		end, ok, err := d.Done(c.device, laneWait)
		if ok {
			return end
		}
		c.err = err
	}
	return Done{}
}

// done tells the end of a copy; one that the device did not take has only bad blocks.
func (s *moverServer) done(c *laneCopy, d Done) {
	if s.lost(c.err) || s.lost(d.Err) {
		return
	}
	if c.err != nil {
		d = allBad(&c.copy, c.err)
	}
	_ = s.send(putDone(nil, c.ticket, &d)) // as in answer
}

// allBad is the end of a copy of which nothing arrived.
func allBad(c *Copy, err error) Done {
	d := Done{Err: err, Bad: make([]bool, len(c.Blocks))}
	for i := range d.Bad {
		d.Bad[i] = true
	}
	if c.Sum {
		d.Sums = make([]uint32, len(c.Blocks))
	}
	return d
}

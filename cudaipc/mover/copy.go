package mover

import (
	"fmt"
	"sync"

	"github.com/kvagent/kvagent/cudaipc"
)

// copyBuffers hold copies that are being sent.
var copyBuffers = sync.Pool{New: func() any { return new([]byte) }}

// Copy checks a copy and sends it to the mover.
func (p *peer) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	var number uint64
	t, err := p.StartCopy(c, p.process.m.opts.ArenaSize, func(f *cudaipc.Flight) (err error) {
		number, err = p.begin(f, int(c.Dir))
		return err
	})
	if err == nil {
		buffer := copyBuffers.Get().(*[]byte)
		defer copyBuffers.Put(buffer)
		*buffer = putCopy(*buffer, number, p.number, c)
		_ = p.process.post("copy", *buffer, nil) // if it fails the process ends, and the copy with it
	}
	return t, err
}

// Sum checks a sample and sends it to the mover.
func (p *peer) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	var number uint64
	t, err := p.StartSum(s, func(f *cudaipc.Flight) (err error) {
		number, err = p.begin(f, sampleLane)
		return err
	})
	if err == nil {
		_ = p.process.post("sum", pack(nil, msgSum, number, &sumHead{p.number, s}), nil) // as in Copy
	}
	return t, err
}

// flight is a copy or a sample that its process has, and the peer's lane that it is in.
type flight struct {
	*cudaipc.Flight
	lane *lane
}

// begin notes that a flight is submitted, and numbers it.
func (p *peer) begin(f *cudaipc.Flight, of int) (number uint64, err error) {
	proc := p.process
	proc.m.mu.Lock()
	defer proc.m.mu.Unlock()
	if proc.over {
		return 0, fmt.Errorf("%w: %w", proc.err(), cudaipc.ErrPeer)
	}
	l := &p.lanes[of]
	if l.pending == 0 {
		l.since = proc.clock.Load()
	}
	l.pending++
	proc.last++
	proc.flights[proc.last] = flight{f, l}
	return proc.last, nil
}

// finish ends a flight with the mover's answer: its caller may use the memory of the copy again.
func (p *process) finish(number uint64, d cudaipc.Done) error {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	f, found := p.flights[number]
	if !found || !f.Fits(&d) {
		return fmt.Errorf("end of copy %d, with %d bad and %d sums: %w", number, len(d.Bad), len(d.Sums), errWire)
	}
	delete(p.flights, number)
	f.lane.pending--
	f.lane.since = p.clock.Load()
	f.End = d
	f.Finish()
	return nil
}

// A peer has a lane for each direction of copies, and one for samples.
const (
	sampleLane = 2
	lanes      = 3
)

// Poll answers a wait now. It reads the peer's words itself. It asks the mover for an event of a
// GPU, and only if the step word has been reached: before that the answer does not depend on it.
func (p *peer) Poll(w cudaipc.Wait) (s cudaipc.State, err error) {
	if !p.asks {
		return p.Base.Poll(w)
	}
	ask := false
	err = p.Use(func() (err error) {
		s, ask, err = p.PollStep(w)
		return err
	})
	if err != nil || !ask {
		return s, err
	}
	return p.process.poll(p.number, w)
}

package mover

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

var errNoSetup = fmt.Errorf("the mover has no device: %w", cudaipc.ErrPeer)

// setup opens the device; the arena's descriptor comes with it.
func (s *server) setup(f *fields, number uint64, fds []int) error {
	var m Setup
	err := takeJSON(f, &m)
	if err != nil || len(fds) != 1 {
		closeAll(fds)
		return fmt.Errorf("setup with %d descriptors: %w: %w", len(fds), errWire, err)
	}
	m.ArenaFD = fds[0]
	s.running.Go(func() {
		defer func() { _ = unix.Close(m.ArenaFD) }()
		s.answer(number, s.openDevice(m))
	})
	return nil
}

func (s *server) openDevice(m Setup) error {
	d, err := s.open(m)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.device != nil {
		return errors.Join(fmt.Errorf("set up already: %w", cudaipc.ErrBusy), d.Close(cudaipc.AllPeers))
	}
	s.mu.device = d
	if l, ok := d.(loser); ok {
		s.running.Go(func() { s.watch(l) })
	}
	return nil
}

// loser is a device that notices its own loss.
type loser interface {
	Lost() <-chan struct{} // closed then
	LostBy() error         // ErrLost and its cause; nil before
}

// watch reports the loss of a device. The failing call reports it too; the first report counts,
// and both have the reason.
func (s *server) watch(d loser) {
	select {
	case <-d.Lost():
		s.lost(d.LostBy())
	case <-s.ending:
	}
}

func (s *server) startImport(f *fields, number uint64, fds []int) error {
	im, err := takeImport(f, fds)
	if err != nil {
		// A process at its limit of descriptors gets fewer: that is not the agent's fault.
		closeAll(fds)
		s.answer(number, fmt.Errorf("%d descriptors arrived: %w", len(fds), err))
		return nil
	}
	s.running.Go(func() { s.answer(number, s.importPeer(im)) })
	return nil
}

// importPeer keeps the proof itself, so that devices need not handle it.
func (s *server) importPeer(im cudaipc.Import) error {
	p := &servedPeer{id: im.Peer, proof: im.Proof}
	im.Proof = 0
	d := s.device()
	if d == nil {
		im.CloseRegions()
		p.closeProof()
		return errNoSetup
	}
	if err := d.Import(im); err != nil {
		p.closeProof()
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.peers[p.id] = p // was not there: the device would have refused
	return nil
}

// closePeer closes a peer, or with AllPeers the device. It changes nothing if the device refuses.
func (s *server) closePeer(id cudaipc.PeerID) error {
	d := s.device()
	if d == nil {
		return nil
	}
	if err := d.Close(id); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.mu.peers {
		if id == cudaipc.AllPeers || p.id == id {
			delete(s.mu.peers, p.id)
			p.endLanes()
			p.closeProof()
		}
	}
	if id == cudaipc.AllPeers {
		s.mu.device = nil
	}
	return nil
}

func (p *servedPeer) endLanes() {
	for i, l := range p.lanes {
		if l != nil {
			close(l.submit)
			p.lanes[i] = nil
		}
	}
}

func (p *servedPeer) closeProof() {
	if p.proof > 0 {
		_ = unix.Close(p.proof)
	}
}

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

// sum puts a sample into its lane.
func (s *server) sum(f *fields, t cudaipc.Ticket) error {
	sample := &cudaipc.Sample{}
	if err := takeJSON(f, sample); err != nil {
		return err
	}
	return s.enqueue(sample.Peer, sampleLane, &laneCopy{
		ticket: t, sample: sample,
		// for allBad
		copy: cudaipc.Copy{Peer: sample.Peer, Sum: true, Blocks: make([]cudaipc.Block, len(sample.Blocks))},
	})
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

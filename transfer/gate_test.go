package transfer

import (
	"sync"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
)

// gate is a peer whose copies stand still between submission and start, until open is called. It
// shows what a worker does while a copy is under way.
type gate struct {
	cudaipc.Peer
	submitted chan struct{} // one for each Copy
	looked    chan struct{} // without room: a ticket finds that a copy has not ended

	mu      sync.Mutex
	opened  bool
	opening chan struct{} // closed when it is opened
	held    []*heldCopy
}

// heldCopy is a copy that stands still, or stood.
type heldCopy struct {
	copy    *cudaipc.Copy
	started cudaipc.Ticket // under gate.mu; nil: it stands still
}

// newGate returns a gate; join puts it before the real peer by its before.
func newGate() *gate {
	return &gate{submitted: make(chan struct{}, 1024), looked: make(chan struct{}), opening: make(chan struct{})}
}

// before puts the gate before a configuration's peer.
func (g *gate) before(c *Config) { g.Peer, c.Peer = c.Peer, g }

func (g *gate) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.opened {
		return g.Peer.Copy(c)
	}
	h := &heldCopy{copy: c}
	g.held = append(g.held, h)
	g.submitted <- struct{}{}
	return func(timeout time.Duration) (cudaipc.Done, bool, error) {
		g.mu.Lock()
		started := h.started
		g.mu.Unlock()
		if started == nil {
			g.stands(timeout)
			return cudaipc.Done{}, false, nil
		}
		return started(timeout)
	}, nil
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.opened {
		close(g.opening)
	}
	g.opened = true
	for _, h := range g.held {
		var err error
		if h.started, err = g.Peer.Copy(h.copy); err != nil {
			panic(err)
		}
	}
	g.held = nil
}

// stands waits in the ticket of a copy that stands still: until a test sees the call, the gate is
// opened, or the ticket's time is over.
func (g *gate) stands(timeout time.Duration) {
	g.mu.Lock()
	opening := g.opening
	g.mu.Unlock()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case g.looked <- struct{}{}:
	case <-opening:
	case <-timer.C:
	}
}

// during waits until a copy has been submitted and does what may happen while it is under way. Then
// the worker must go on waiting (the gate is opened at the latest at the test's end): a completion
// meanwhile is a failure that why explains.
func (g *gate) during(s *station, why string, happens func()) {
	s.t.Helper()
	s.t.Cleanup(g.open) // a failed test must not leave the worker waiting
	select {
	case <-g.submitted:
	case c := <-s.done:
		s.t.Fatalf("%s: job %d was completed without a copy: %v", why, c.Job, c.Status)
	case <-time.After(patience):
		s.t.Fatalf("no copy within %v", patience)
	}
	happens()
	for looks := 0; looks < 5 || len(s.done) > 0; looks++ { // the first may have begun before
		select {
		case c := <-s.done:
			s.t.Fatalf("%s: job %d was completed with %v while its copy was under way", why, c.Job, c.Status)
		case <-g.looked:
		case <-time.After(patience):
			s.t.Fatalf("%s: no wait for the copy", why)
		}
	}
}

// takes waits until n copies have been submitted, and sees that it stays at that while none of them
// ends.
func (g *gate) takes(s *station, n int) {
	s.t.Helper()
	s.t.Cleanup(g.open)
	for i := range n - 1 {
		select {
		case <-g.submitted:
		case <-time.After(patience):
			s.t.Fatalf("%d copies are under way, want %d: the next is not begun before one has ended", i, n)
		}
	}
	g.during(s, "while its copies stand still", func() {})
	if more := len(g.submitted); more > 0 {
		s.t.Errorf("%d copies are under way, want %d", n+more, n)
	}
}

// mixedUp is a pool that hands out the first two slots of a batch exchanged, each with its own sum:
// the kind of mistake that only a checksum bound to the key can see.
type mixedUp struct{ Slots }

func (m mixedUp) Acquire(b *pool.Batch) {
	m.Slots.Acquire(b)
	a, c := &b.Slots[0], &b.Slots[1]
	a.Off, c.Off = c.Off, a.Off
	a.Sum, c.Sum = c.Sum, a.Sum
}

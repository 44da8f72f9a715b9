package dram

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Limits of what is passed to a policy about look-ups.
const (
	maxNotes      = 64       // queued look-ups; a further one is dropped and counted
	wakeNotes     = 8        // queued look-ups from which they are delivered without waiting for a reservation
	maxNoteBlocks = 8 << 10  // leading blocks of one look-up that are delivered, exceeded by a group at most
	catchUpBlocks = 16 << 10 // blocks that a reservation delivers before it goes on
)

// The goroutine uses at most a quarter of one core, whatever the rate of look-ups: it rests after
// every stint.
const (
	deliverStint = time.Millisecond
	deliverRest  = 3 * deliverStint
)

// advisor owns the policy. Look-ups queue a note and do not wait; a goroutine or the next
// reservation delivers the notes to the policy. A nil advisor has no policy: entries are evicted in
// the order of their last use.
type advisor struct {
	now     func() time.Time
	start   time.Time
	notes   chan *note // received only with mu held, so an empty queue under mu means that all are delivered
	spare   chan *note
	wake    chan struct{}
	dropped atomic.Uint64 // look-ups not passed to the policy

	ending, ended chan struct{}

	mu     sync.Mutex // guards policy and the fields below; taken after the pool's lock, or without it
	policy pool.Policy
	in     pool.Insertion
	one    [1]uint32
}

// note is one queued look-up.
type note struct {
	use    pool.Use
	id     ident
	missed bool // it ended at a block that is not stored
}

func newAdvisor(policy pool.Policy, now func() time.Time) *advisor {
	if policy == nil {
		return nil
	}
	a := &advisor{
		now: now, start: now(), policy: policy, notes: make(chan *note, maxNotes), spare: make(chan *note, maxNotes),
		wake: make(chan struct{}, 1), ending: make(chan struct{}), ended: make(chan struct{}),
	}
	go a.run()
	return a
}

// run delivers notes until close.
func (a *advisor) run() {
	defer close(a.ended)
	for {
		select {
		case <-a.wake:
			for a.stint() {
				rest := time.NewTimer(deliverRest)
				select {
				case <-rest.C:
				case <-a.ending:
					rest.Stop()
					return
				}
			}
		case <-a.ending:
			return
		}
	}
}

// stint delivers notes for deliverStint, and reports whether there may be more.
func (a *advisor) stint() bool {
	for began := time.Now(); time.Since(began) < deliverStint; {
		if a.deliver() == 0 {
			return false
		}
	}
	return true
}

// close ends run and waits for it. Nothing may be noted afterwards.
func (a *advisor) close() {
	if a != nil {
		close(a.ending)
		<-a.ended
	}
}

// deliver passes one look-up to the policy and returns its number of blocks, 0 if none is queued.
func (a *advisor) deliver() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	select {
	case n := <-a.notes:
		a.policy.Access(&n.use)
		blocks := len(n.use.Prints)
		a.recycle(n)
		return blocks
	default:
		return 0
	}
}

// catchUp delivers queued notes, within limits, so that a reservation right after a look-up takes
// it into account.
func (a *advisor) catchUp() {
	if a == nil {
		return
	}
	for left := catchUpBlocks; left > 0; {
		n := a.deliver()
		if n == 0 {
			return
		}
		left -= n
	}
}

// begin returns an empty note; nil without a policy.
func (a *advisor) begin() *note {
	if a == nil {
		return nil
	}
	var n *note
	select {
	case n = <-a.spare:
	default:
		n = &note{}
	}
	n.use.Now, n.missed = a.time(), false
	n.use.Entries, n.use.Prints = n.use.Entries[:0], n.use.Prints[:0]
	return n
}

// time returns the pool's clock in ns.
func (a *advisor) time() int64 { return int64(a.now().Sub(a.start)) }

func (a *advisor) recycle(n *note) {
	select {
	case a.spare <- n:
	default:
	}
}

// end queues a note.
func (a *advisor) end(n *note) {
	if n == nil {
		return
	}
	if len(n.use.Prints) == 0 {
		a.recycle(n)
		return
	}
	select {
	case a.notes <- n:
	default:
		a.dropped.Add(1)
		a.recycle(n)
		return
	}
	if len(a.notes) < wakeNotes {
		return
	}
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// describe sets what the blocks of the note are.
func (n *note) describe(id ident, g *group) {
	if n != nil {
		n.id, n.use.BlockTokens = id, g.tokens
	}
}

// addFound adds a group of blocks that were looked up, up to the first that is not stored.
func (n *note) addFound(s *seed, pr *probe, looked, stored int) {
	if n == nil || len(n.use.Prints) >= maxNoteBlocks {
		return
	}
	n.use.Entries = append(n.use.Entries, pr.entry[:stored]...)
	for i := range stored {
		n.use.Prints = append(n.use.Prints, s.hash(n.id, pr.key[i]))
	}
	n.missed = stored < looked && pr.entry[stored] == none
}

// addRest adds the blocks from index from on, if the one there was missed. It does not need the
// pool's lock.
func (n *note) addRest(s *seed, h *pool.Hashes, from int) {
	if n == nil || !n.missed {
		return
	}
	v := viewOf(h)
	for i := from; i < h.N && len(n.use.Prints) < maxNoteBlocks; i++ {
		n.use.Prints = append(n.use.Prints, s.hash(n.id, v.words(i)))
	}
}

// remove removes an entry from the policy.
func (a *advisor) remove(e uint32) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.one[0] = e
	a.policy.Remove(a.one[:])
}

// victim returns an entry of one of the kinds that the policy evicts, or none.
func (a *advisor) victim(kinds uint64, v pool.View) uint32 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.policy.Victim(a.time(), kinds, v)
}

// report returns the policy's report.
func (a *advisor) report() pool.PolicyReport {
	if a == nil {
		return pool.PolicyReport{Name: "lru"}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.policy.Report()
	r.LookupsDropped = a.dropped.Load()
	return r
}

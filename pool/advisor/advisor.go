// Package advisor keeps an eviction policy beside a pool: look-ups queue notes for it and do not
// wait, and reservations ask it for victims.
package advisor

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Limits of what is passed to a policy about look-ups.
const (
	MaxNotes      = 64       // queued look-ups; a further one is dropped and counted
	wakeNotes     = 8        // queued look-ups from which they are delivered without waiting for a reservation
	catchUpBlocks = 16 << 10 // blocks that a reservation delivers before it goes on
)

// The goroutine rests after each stint: without rests, reservations wait for it for long, with the
// pool's lock held.
const (
	deliverStint = time.Millisecond
	deliverRest  = 3 * deliverStint
)

// Advisor is a pool.Advisor that owns a policy. Look-ups queue a note and do not wait; a goroutine
// or the next reservation delivers the notes to the policy.
type Advisor struct {
	now     func() time.Time
	start   time.Time
	notes   chan *pool.Note // received only with mu held, so an empty queue under mu means that all are delivered
	spare   chan *pool.Note // with memory for thousands of blocks, so no sync.Pool, which a collection empties
	wake    chan struct{}
	dropped atomic.Uint64 // look-ups not passed to the policy

	ending, ended chan struct{}

	mu     sync.Mutex // guards policy and the fields below; taken after the pool's lock, or without it
	policy Policy
	beyond unlimited
	in     pool.Insertion
	one    [1]uint32
}

// New starts an advisor of a policy. now is the pool's clock, nil for time.Now.
func New(policy Policy, now func() time.Time) *Advisor {
	if now == nil {
		now = time.Now
	}
	a := &Advisor{
		now: now, start: now(), policy: policy,
		notes: make(chan *pool.Note, MaxNotes), spare: make(chan *pool.Note, MaxNotes),
		wake: make(chan struct{}, 1), ending: make(chan struct{}), ended: make(chan struct{}),
	}
	go a.run()
	return a
}

// run delivers notes until Close.
func (a *Advisor) run() {
	defer close(a.ended)
	for {
		select {
		case <-a.wake:
			for a.stint() {
				select {
				case <-time.After(deliverRest):
				case <-a.ending:
					return
				}
			}
		case <-a.ending:
			return
		}
	}
}

// stint delivers notes for deliverStint, and reports whether there may be more.
func (a *Advisor) stint() bool {
	for began := time.Now(); time.Since(began) < deliverStint; {
		if a.deliver() == 0 {
			return false
		}
	}
	return true
}

// Close ends run and waits for it. Nothing may be noted afterwards.
func (a *Advisor) Close() {
	close(a.ending)
	<-a.ended
}

// deliver passes one look-up to the policy and returns its number of blocks, 0 if none is queued.
func (a *Advisor) deliver() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	select {
	case n := <-a.notes:
		a.policy.Access(&n.Use)
		a.beyond.looked(&n.Use)
		blocks := len(n.Use.Prints)
		a.recycle(n)
		return blocks
	default:
		return 0
	}
}

// CatchUp delivers queued notes, within limits, so that a reservation right after a look-up takes
// it into account.
func (a *Advisor) CatchUp() {
	for left := catchUpBlocks; left > 0; {
		n := a.deliver()
		if n == 0 {
			return
		}
		left -= n
	}
}

// Begin returns an empty note.
func (a *Advisor) Begin() *pool.Note {
	var n *pool.Note
	select {
	case n = <-a.spare:
	default:
		n = &pool.Note{}
	}
	n.Use.Now, n.Missed = a.time(), false
	n.Use.Entries, n.Use.Prints = n.Use.Entries[:0], n.Use.Prints[:0]
	return n
}

// time returns the pool's clock in ns.
func (a *Advisor) time() int64 { return int64(a.now().Sub(a.start)) }

func (a *Advisor) recycle(n *pool.Note) {
	select {
	case a.spare <- n:
	default:
	}
}

// End queues a note.
func (a *Advisor) End(n *pool.Note) {
	if len(n.Use.Prints) == 0 {
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

// Remove removes an entry from the policy.
func (a *Advisor) Remove(e uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.one[0] = e
	a.policy.Remove(a.one[:])
}

// Class returns the name of an entry's class, empty if it has none.
func (a *Advisor) Class(e uint32) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.policy.Class(e)
}

// Victim returns Policy.Victim.
func (a *Advisor) Victim(kinds, print uint64, v pool.View) uint32 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.policy.Victim(a.time(), kinds, print, v)
}

// Advise passes advice to the policy, with how long a wish lasts; 0: there is none.
func (a *Advisor) Advise(ad *pool.Advice, lasts time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ad.Now = a.time()
	if lasts > 0 {
		ad.Until = ad.Now + int64(lasts)
	}
	a.policy.Advise(ad)
}

// Report returns the policy's report.
func (a *Advisor) Report() pool.PolicyReport {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.policy.Report()
	r.LookupsDropped, r.Beyond = a.dropped.Load(), a.beyond.extra
	return r
}

// Insert passes runs of entries that became visible to the policy: fill describes the next run, all
// but its time, and reports whether more follow.
func (a *Advisor) Insert(fill func(in *pool.Insertion) (more bool)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.in.Now = a.time()
	for more := true; more; {
		more = fill(&a.in)
		a.policy.Insert(&a.in)
		a.beyond.stored(a.in.Prints)
	}
}

// Learned returns what the policy learned; nil if there is nothing to save.
func (a *Advisor) Learned() []byte {
	learner, ok := a.policy.(Learner)
	if !ok {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return learner.Learned()
}

// Learn passes what was saved to the policy.
func (a *Advisor) Learn(learned []byte) error {
	learner, ok := a.policy.(Learner)
	if !ok {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return learner.Learn(learned)
}

// unlimited estimates how many blocks that were looked up and missed a pool would have had that
// evicts nothing. It keeps the prints of a sample of all blocks that were ever stored: those whose
// lowest bits are 0, fewer and fewer as there are more, so that they fit. A reset gives blocks
// other prints, so prints from before it do not count. Its memory is fixed, and so is its work for
// each block.
type unlimited struct {
	sets  [][ways]uint64 // nil before the first block
	bits  uint           // lowest bits of a print that are 0 in the sample: one block in 1 << bits
	extra uint64         // blocks missed that it would have had, about
}

const (
	setBits = 12 // of the number of sets: 256 KiB
	ways    = 8  // prints of a set, 0: none; a cache line
)

func (u *unlimited) samples(print uint64) bool { return print&(1<<u.bits-1) == 0 && print != 0 }

func (u *unlimited) set(print uint64) *[ways]uint64 { return &u.sets[print>>(64-setBits)] }

// stored adds blocks that were stored.
func (u *unlimited) stored(prints []uint64) {
	if u.sets == nil {
		u.sets = make([][ways]uint64, 1<<setBits)
	}
	for _, print := range prints {
		for u.samples(print) && !u.add(print) {
			u.bits++
		}
	}
}

// add adds a print to its set, where it replaces one that is not of the sample any more. It returns
// false if there is no room.
func (u *unlimited) add(print uint64) bool {
	set, free := u.set(print), -1
	for i, other := range set {
		if other == print {
			return true
		}
		if !u.samples(other) {
			free = i
		}
	}
	if free < 0 {
		return false
	}
	set[free] = print
	return true
}

// looked counts a look-up.
func (u *unlimited) looked(use *pool.Use) {
	if u.sets == nil {
		return
	}
	for _, print := range use.Prints[len(use.Entries):] {
		if !u.samples(print) {
			continue
		}
		for _, other := range u.set(print) {
			if other == print {
				u.extra += 1 << u.bits
				break
			}
		}
	}
}

package events

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// Limits of tails.
const (
	MaxTails   = 4      // at once; a further one is refused
	tailBlocks = 1 << 8 // told by one call of Next
	maxDepth   = 1<<16 - 1
)

// Errors of Desk.Tail, to branch on.
var (
	ErrNoJournal    = errors.New("the agent's pool does not note which blocks come and go")
	ErrTooManyTails = fmt.Errorf("%d are open, allowed: %d at once", MaxTails, MaxTails)
)

// Kinds of Transition.
const (
	Stored  = "stored"
	Removed = "removed"
	Cleared = "cleared" // the space was reset or closed, so that nothing is held that was
	Missed  = "missed"  // blocks came and went, or went and came, before the tail asked
)

// Transition is what has become of some blocks of one group of a space: of a chain, if they were
// stored or removed.
type Transition struct {
	Space       pool.SpaceID
	Kind        string
	Medium      uint8 // one of ipc's
	Group       uint8
	Blocks      int    // of Missed: transitions
	Tokens      int    // of all these blocks
	Before      int    // tokens of the chain before them; -1: not known
	Parent      []byte // hash before the first; nil: there is none, or it is not known
	First, Last []byte
}

// Tail tells an operator what routers are told, of all spaces that it wants. It is asked, so a slow
// reader keeps nobody waiting and nothing in memory: it is told the net difference, and how many
// transitions that leaves out. Its methods must not be called concurrently.
type Tail struct {
	desk   *Desk
	number int // among the tails
	follow bool
	wants  func(pool.SpaceID) bool
	wake   chan struct{} // cap 1: there may be something to tell
	spaces map[pool.SpaceID]*tailed
	last   pool.SpaceID // of which something was told
}

// tailed is a tail's state of one space. The space's lock guards it.
type tailed struct {
	space   *space // nil: not wanted
	bit     uint64
	cursors []cursor
	clears  int // that were told
	held    int // blocks that are told stored, once for each medium
	counted uint64
}

// Tail returns a tail that tells what is held, as a new session is told, and then ends; with
// follow, it tells what changes from now on, until Close. It must be closed.
func (d *Desk) Tail(follow bool, wants func(pool.SpaceID) bool) (*Tail, error) {
	if d == nil {
		return nil, ErrNoJournal
	}
	t := &Tail{
		desk: d, follow: follow, wants: wants, wake: make(chan struct{}, 1), spaces: map[pool.SpaceID]*tailed{},
	}
	d.mu.Lock()
	if t.number = slices.Index(d.tails[:], nil); t.number < 0 {
		d.mu.Unlock()
		return nil, ErrTooManyTails
	}
	d.tails[t.number] = t
	d.mu.Unlock()
	t.join(follow)
	return t, nil
}

// Close ends the tail.
func (t *Tail) Close() {
	for _, one := range t.spaces {
		if one.space != nil {
			one.space.part(t, one)
		}
	}
	t.desk.mu.Lock()
	defer t.desk.mu.Unlock()
	t.desk.tails[t.number] = nil
}

// Off reports that no engine asks for events in any space that the tail wants.
func (t *Tail) Off() bool {
	for _, one := range t.spaces {
		if one.space != nil {
			return false
		}
	}
	return true
}

// Next returns the next transitions, as soon as there are some. After Desk.Close, and without
// follow when all was told, the error is io.EOF.
func (t *Tail) Next(ctx context.Context) ([]Transition, error) {
	for {
		t.join(false)
		out, all := t.look()
		switch {
		case len(out) > 0:
			return out, nil
		case !all:
			continue
		case !t.follow:
			return nil, io.EOF
		}
		select {
		case <-t.wake:
		case <-t.desk.stop:
			return nil, io.EOF
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// join finds spaces that are new; with adopt, what they hold counts as told.
func (t *Tail) join(adopt bool) {
	all := t.desk.all()
	for id, sp := range all {
		if t.spaces[id] == nil {
			t.spaces[id] = &tailed{}
			if t.wants(id) {
				t.spaces[id] = sp.join(t, adopt)
			}
		}
	}
}

// look asks the spaces, beginning after the one that told something last.
func (t *Tail) look() (out []Transition, all bool) {
	closed := t.closed() // before the spaces are asked: all is known of these by now
	ids := slices.Sorted(maps.Keys(t.spaces))
	at, _ := slices.BinarySearch(ids, t.last+1)
	all = true
	for _, id := range slices.Concat(ids[at:], ids[:at]) {
		one := t.spaces[id]
		if one.space == nil {
			continue
		}
		more, whole := one.space.tell(one)
		if all = all && whole; len(more) > 0 {
			t.last = id
			return more, false
		}
	}
	t.drop(closed)
	return nil, all
}

// closed returns the spaces that the desk has dropped, after it compared them for the last time.
func (t *Tail) closed() (all []pool.SpaceID) {
	for id := range t.spaces {
		if t.desk.get(id) == nil {
			all = append(all, id)
		}
	}
	return all
}

// drop forgets spaces that were closed, of which all was told.
func (t *Tail) drop(closed []pool.SpaceID) {
	for _, id := range closed {
		if one := t.spaces[id]; one.space != nil {
			one.space.part(t, one)
		}
		delete(t.spaces, id)
	}
}

// signal wakes a tail.
func (t *Tail) signal() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// join begins what a tail is told of a space.
func (sp *space) join(t *Tail, adopt bool) *tailed {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	one := &tailed{space: sp, bit: 1 << (maxSubscribers + t.number), cursors: make([]cursor, len(sp.ledgers))}
	sp.tails[t] = true
	sp.begin(one)
	for g, l := range sp.ledgers {
		if l != nil && adopt {
			one.held += l.adopt(one.bit)
			one.cursors[g].scan = 0
		}
	}
	if adopt {
		one.counted = sp.flips()
	}
	return one
}

// part ends what a tail is told of a space.
func (sp *space) part(t *Tail, one *tailed) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	delete(sp.tails, t)
	sp.begin(one)
}

// begin makes a tail one that has been told nothing.
func (sp *space) begin(one *tailed) {
	one.held, one.counted, one.clears = 0, sp.flips(), sp.clears
	for g, l := range sp.ledgers {
		if l != nil {
			l.withdraw(one.bit)
			l.begin(&one.cursors[g])
			one.counted -= uint64(l.told())
		}
	}
}

// flips returns how often blocks became held or ceased to be.
func (sp *space) flips() (n uint64) {
	for _, l := range sp.ledgers {
		if l != nil {
			n += l.flips
		}
	}
	return n
}

// tell returns a tail's next transitions, and whether these are all. Of a reset the tail is told
// once all that it removed is known.
func (sp *space) tell(one *tailed) (list []Transition, all bool) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	if sp.clearing && one.held > 0 {
		return nil, true
	}
	if one.clears != sp.clears {
		if one.held > 0 {
			list = append(list, Transition{Space: sp.id, Kind: Cleared, Blocks: one.held, Before: -1})
		}
		sp.begin(one)
	}
	out := newBatch(tailBlocks)
	out.chains = true
	all = sp.take(one.cursors, one.bit, out)
	for i := range out.runs {
		next := out.transition(i, sp.ledgers)
		next.Space = sp.id
		list = append(list, next)
		one.counted += uint64(next.Blocks)
		if next.Kind == Stored {
			one.held += next.Blocks
		} else {
			one.held -= next.Blocks
		}
	}
	if flips := sp.flips(); all && flips > one.counted {
		list = append(list, Transition{Space: sp.id, Kind: Missed, Blocks: int(flips - one.counted), Before: -1})
		one.counted = flips
	}
	return list, all
}

// transition returns a run as operators are told it.
func (out *batch) transition(i int, ledgers []*ledger) Transition {
	r, n := &out.runs[i], int(out.runs[i].HashLen)
	blocks := len(r.Hashes) / n
	size := ledgers[r.Group].stride / tokenBytes
	next := Transition{
		Kind: Stored, Medium: r.Medium, Group: r.Group, Blocks: blocks, Tokens: blocks * size, Before: -1,
		Parent: r.Parent, First: r.Hashes[:n], Last: r.Hashes[len(r.Hashes)-n:],
	}
	depth := int(out.depths[i])
	if r.Kind == ipc.EventRemoved { // the last one first
		next.Kind, next.First, next.Last = Removed, next.Last, next.First
		depth -= blocks - 1
	}
	if out.depths[i] < maxDepth {
		next.Before = (depth - 1) * size
	}
	return next
}

// adopt makes a subscriber one that has been told everything, and returns how many blocks that is.
func (l *ledger) adopt(bit uint64) int {
	for n := uint32(1); n < l.high; n++ {
		for m, b := 0, l.at(n); m < media; m++ {
			if b.wanted()&(1<<m) != 0 {
				b.told[m] |= bit
			}
		}
	}
	return l.told()
}

// told returns how many blocks subscribers are told, once for each medium.
func (l *ledger) told() (n int) {
	for _, blocks := range l.reachable {
		n += blocks
	}
	return n
}

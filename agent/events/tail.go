package events

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/kvagent/kvagent/pool"
)

// Limits of tails.
const (
	MaxTails   = 4      // at once; a further one is refused
	tailBlocks = 1 << 8 // told by one call of Next
)

// ErrTooManyTails means that MaxTails are open.
var ErrTooManyTails = fmt.Errorf("%d are open, allowed: %d at once", MaxTails, MaxTails)

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
// reader keeps nobody waiting and nothing in memory: it is told how many transitions it has missed.
// Its methods must not be called concurrently. The desk's lock guards its state.
type Tail struct {
	desk   *Desk
	follow bool
	wants  func(pool.SpaceID) bool
	wake   chan struct{} // cap 1: there may be something to tell
	spaces map[*space]*tailed
	ended  []Transition // what is to be told first: spaces that were cleared
	off    bool
}

// tailed is a tail's state of one space; nil: it is not wanted.
type tailed struct {
	cursors []cursor
	held    int    // blocks that are told stored, once for each medium
	counted uint64 // flips that were told
}

// Tail returns a tail that tells what is held, as a new session is told, and then ends; with
// follow, it tells what changes from now on, until Close. It must be closed.
func (d *Desk) Tail(follow bool, wants func(pool.SpaceID) bool) (*Tail, error) {
	t := &Tail{
		desk: d, follow: follow, wants: wants, wake: make(chan struct{}, 1), spaces: map[*space]*tailed{}, off: true,
	}
	d.mu.Lock()
	full := len(d.tails) == MaxTails
	if !full {
		d.tails[t] = true
	}
	d.mu.Unlock()
	if full {
		return nil, ErrTooManyTails
	}
	t.join(follow)
	return t, nil
}

// Close ends the tail.
func (t *Tail) Close() {
	t.desk.mu.Lock()
	defer t.desk.mu.Unlock()
	delete(t.desk.tails, t)
}

// Off reports that no engine asked for events in any space that the tail wants when it began.
func (t *Tail) Off() bool { return t.off }

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

// look asks the spaces, in any order.
func (t *Tail) look() (out []Transition, all bool) {
	t.desk.mu.Lock()
	defer t.desk.mu.Unlock()
	if out, t.ended = t.ended, nil; len(out) > 0 {
		return out, false
	}
	for _, sp := range t.desk.spaces {
		if one := t.spaces[sp]; one != nil {
			if out, all = one.tell(sp); len(out) > 0 || !all {
				return out, all
			}
		}
	}
	return nil, true
}

// join finds spaces that are new; with adopt, what they hold counts as told.
func (t *Tail) join(adopt bool) {
	d := t.desk
	d.mu.Lock()
	spaces := slices.Collect(maps.Values(d.spaces))
	spaces = slices.DeleteFunc(spaces, func(sp *space) bool { _, there := t.spaces[sp]; return there })
	d.mu.Unlock()
	for _, sp := range spaces {
		wanted := t.wants(sp.id) // which must not be called with the lock held
		d.mu.Lock()
		if t.spaces[sp] = nil; wanted {
			t.off = false
			t.spaces[sp] = sp.join(adopt)
		}
		d.mu.Unlock()
	}
}

func (sp *space) join(adopt bool) *tailed {
	one := &tailed{cursors: sp.cursors(), counted: sp.flips() - uint64(sp.held())}
	if adopt {
		for i, l := range sp.ledgers {
			one.cursors[i] = cursor{told: l.placed, seen: l.end()}
		}
		one.held, one.counted = sp.held(), sp.flips()
	}
	return one
}

// signal wakes a tail.
func (t *Tail) signal() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// clear handles that a space was reset or closed. It is called before its ledgers go.
func (t *Tail) clear(sp *space) {
	if one := t.spaces[sp]; one != nil && one.held > 0 {
		t.ended = append(t.ended, Transition{Space: sp.id, Kind: Cleared, Blocks: one.held, Before: -1})
	}
	delete(t.spaces, sp)
	t.signal()
}

// flips returns how often blocks came to media or left them.
func (sp *space) flips() (n uint64) {
	for _, l := range sp.ledgers {
		n += l.flips
	}
	return n
}

// held returns how many blocks subscribers are told, once for each medium.
func (sp *space) held() (n int) {
	for _, l := range sp.ledgers {
		for _, blocks := range l.told {
			n += blocks
		}
	}
	return n
}

// tell returns a tail's next transitions, and whether these are all.
func (one *tailed) tell(sp *space) (list []Transition, all bool) {
	for i, l := range sp.ledgers {
		if c := &one.cursors[i]; l.missed(c) {
			c.seen = l.end()
		}
	}
	told, all := sp.take(one.cursors, tailBlocks)
	for _, r := range runs(told, false) {
		list = append(list, r.transition(sp.id))
		if r.stored {
			one.held += len(r.blocks)
		} else {
			one.held -= len(r.blocks)
		}
	}
	one.counted += uint64(len(told))
	if flips := sp.flips(); all && flips > one.counted {
		list = append(list, Transition{Space: sp.id, Kind: Missed, Blocks: int(flips - one.counted), Before: -1})
		one.counted, one.held = flips, sp.held()
	}
	return list, all
}

// transition returns a run as operators are told it.
func (r *run) transition(space pool.SpaceID) Transition {
	l, size := r.l, r.l.stride/tokenBytes
	first, last := r.blocks[0], r.blocks[len(r.blocks)-1]
	next := Transition{
		Space: space, Kind: Stored, Medium: r.wireMedium(), Group: l.group, Blocks: len(r.blocks),
		Tokens: len(r.blocks) * size,
	}
	if !r.stored {
		next.Kind = Removed
		first, last = last, first
	}
	next.First, next.Last = bytes.Clone(l.hash(first)), bytes.Clone(l.hash(last))
	next.Parent = bytes.Clone(l.parent(first))
	for n := l.at(first).parent; n != 0; n = l.at(n).parent {
		next.Before += size
	}
	return next
}

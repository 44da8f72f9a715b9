// Package raise brings blocks that only the tiers below memory have into memory, before an engine
// asks for them: for another agent that fetches them, and for a hint.
package raise

import (
	"context"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Bounds of bringing up blocks.
const (
	most  = 4        // at a time, each of one group
	bytes = 64 << 20 // that one of them pins at a time, while they come and until they are announced
	// askWithin is how long it waits for the tiers before it looks whether it is to end; a question
	// that is still open is waited for again.
	askWithin = 100 * time.Millisecond
)

// Raiser brings blocks into memory. Its methods may be called from any goroutine.
type Raiser struct {
	Config
	places chan struct{} // has room for as many calls as may work
}

// Config is what a raiser works on.
type Config struct {
	Index pool.Index
	Tiers pool.Tiers // nil: there are none
	// Windowed reports whether a group of a space has a sliding window, of which blocks after a gap
	// count, too.
	Windowed func(s pool.SpaceID, group uint8) bool
	// Committed tells those who wait for blocks of a space that some have come.
	Committed func(s pool.SpaceID)
}

// New makes a raiser.
func New(c Config) *Raiser { return &Raiser{c, make(chan struct{}, most)} }

// Raise brings what only the tiers below memory have of a chain into memory. It returns when
// nothing more of it comes, there is no room, or ctx ends.
func (r *Raiser) Raise(ctx context.Context, s pool.SpaceID, group uint8, h pool.Hashes) {
	if r.Tiers == nil {
		return
	}
	select {
	case r.places <- struct{}{}:
		defer func() { <-r.places }()
	case <-ctx.Done():
		return
	}
	asked := []pool.Asked{{Group: group, Hashes: h, Sparse: r.Windowed(s, group)}}
	for r.Tiers.Ask(s, asked, time.Now().Add(askWithin), false) {
		if ctx.Err() != nil {
			return
		}
	}
	present := make([]bool, h.N)
	r.Index.Exists(s, group, h, present)
	for from := 0; from < h.N && ctx.Err() == nil; {
		to := from
		for to < h.N && present[to] {
			to++
		}
		if to == from {
			from++
			continue
		}
		n := r.some(ctx, s, group, h.Slice(from, to))
		if n == 0 {
			return // no room, or evicted meanwhile
		}
		from += n
	}
}

// some brings up the first blocks of a chain, as many as one round may pin, and returns how many.
func (r *Raiser) some(ctx context.Context, s pool.SpaceID, group uint8, h pool.Hashes) int {
	n, refs, _ := r.Index.Pin(s, group, h, bytes, nil)
	defer r.Index.Unpin(refs)
	there := make(chan struct{})
	forget := r.Tiers.Settle(refs, func() { close(there) })
	if forget == nil {
		close(there)
		forget = func() bool { return false }
	}
	select {
	case <-there:
		r.Committed(s)
	case <-ctx.Done():
		forget()
	}
	return n
}

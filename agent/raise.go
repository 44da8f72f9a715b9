package agent

import (
	"context"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Bounds of bringing up blocks for other agents.
const (
	maxRaises  = 4        // at a time, each of one group of one fetch
	raiseBytes = 64 << 20 // that one of them pins at a time, while they come and until they are announced
	// raiseAsk is how long one question to the tiers waits: longer than for look-ups, which a
	// scheduler waits for, and short beside the time that the end of a fetch may take.
	raiseAsk = 100 * time.Millisecond
)

// Raise brings what only the tiers below memory have of a chain into memory, for another agent that
// fetches it: blocks are sent from memory alone. It returns when nothing more of them comes, there
// is no room, or ctx ends. Those that wait for the blocks are woken as they come.
func (a *Agent) Raise(ctx context.Context, s pool.SpaceID, group uint8, h pool.Hashes) {
	if a.tiers == nil {
		return
	}
	select {
	case a.raising <- struct{}{}:
		defer func() { <-a.raising }()
	case <-ctx.Done():
		return
	}
	asked := []pool.Asked{{Group: group, Hashes: h, Sparse: a.registry.windowed(s, group)}}
	for a.tiers.Ask(s, asked, time.Now().Add(raiseAsk)) {
		if ctx.Err() != nil {
			return
		}
	}
	present := make([]bool, h.N)
	a.pool.Exists(s, group, h, present)
	for from := 0; from < h.N && ctx.Err() == nil; {
		to := from
		for to < h.N && present[to] {
			to++
		}
		if to == from {
			from++
			continue
		}
		n := a.raise(ctx, s, group, h.Slice(from, to))
		if n == 0 {
			return // no room, or evicted meanwhile
		}
		from += n
	}
}

// raise brings up the first blocks of a chain, as many as one round may pin, and returns how many.
func (a *Agent) raise(ctx context.Context, s pool.SpaceID, group uint8, h pool.Hashes) int {
	n, refs, _ := a.pool.Pin(s, group, h, raiseBytes, nil)
	defer a.pool.Unpin(refs)
	there := make(chan struct{})
	forget := a.tiers.Settle(refs, func() { close(there) })
	select {
	case <-there:
		a.deliveries.Committed(s)
	case <-ctx.Done():
		forget()
	}
	return n
}

// windowed reports whether a group of a space has a sliding window, of which blocks after a gap
// count, too.
func (r *registry) windowed(s pool.SpaceID, group uint8) bool {
	for _, sp := range r.view.Load().spaces {
		if rules := sp.open.Load(); rules != nil && rules.ID == s && int(group) < len(rules.Groups) {
			return rules.Groups[group].Window != 0
		}
	}
	return false
}

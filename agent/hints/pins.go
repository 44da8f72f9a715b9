package hints

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// maxPinned bounds the blocks that are pinned.
const maxPinned = 1 << 18

// pins are the pinned blocks. A block is pinned once, for the longest time that an action told.
type pins struct {
	byRef  map[pool.Ref]pin
	bytes  int64
	serial uint64
}

type pin struct {
	space  pool.SpaceID
	epoch  uint32
	bytes  int64
	serial uint64 // in the order of chains
	until  time.Time
}

func newPins() pins { return pins{byRef: map[pool.Ref]pin{}} }

// add pins the blocks of a chain, as far as the budget goes. It returns how many of them are
// pinned, and their bytes.
func (p *pins) add(m Memory, budget int64, w *wish, c *Chain) (blocks int, bytes int64) {
	refs, each := m.PinEach(w.space, c.Group, c.Hashes, nil)
	surplus := refs[:0]
	for _, ref := range refs {
		old, again := p.byRef[ref]
		switch {
		case again:
			if w.at.After(old.until) {
				old.until = w.at
				p.byRef[ref] = old
			}
			surplus = append(surplus, ref)
		case p.bytes+each > budget || len(p.byRef) == maxPinned:
			surplus = append(surplus, ref)
			continue
		default:
			p.serial++
			p.byRef[ref] = pin{space: w.space, epoch: w.epoch, bytes: each, serial: p.serial, until: w.at}
			p.bytes += each
		}
		blocks, bytes = blocks+1, bytes+each
	}
	m.Unpin(surplus)
	return blocks, bytes
}

// take removes the pins that are over, and returns their refs: each chain from its start on, as
// Unpin keeps its order.
func (p *pins) take(over func(p *pin) bool) []pool.Ref {
	type numbered struct {
		ref    pool.Ref
		serial uint64
	}
	var all []numbered
	for ref, one := range p.byRef {
		if over(&one) {
			delete(p.byRef, ref)
			p.bytes -= one.bytes
			all = append(all, numbered{ref, one.serial})
		}
	}
	slices.SortFunc(all, func(a, b numbered) int { return cmp.Compare(a.serial, b.serial) })
	refs := make([]pool.Ref, len(all))
	for i := range all {
		refs[i] = all[i].ref
	}
	return refs
}

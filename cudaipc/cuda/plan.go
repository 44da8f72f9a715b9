package cuda

import (
	"slices"

	"github.com/kvagent/kvagent/cudaipc"
)

// A copy list comes from the layout of an engine: many short runs, whose neighbours are often
// contiguous, or at constant distances. A plan makes the same copies in few calls, in one pass over
// the list. It is pure: addresses are numbers here.

// span is one contiguous copy between a GPU and the arena.
type span struct {
	dev uint64           // where on the GPU
	off uint64           // where in the arena
	n   uint64           // bytes
	in  cudaipc.RegionID // no call goes from one region to another: they may be of two allocations
}

// rect is rows copies of one length at constant distances. A single copy is one row.
type rect struct {
	span
	rows               uint64
	devPitch, offPitch uint64 // bytes; of no meaning with one row
}

// planLimits bound a single call.
type planLimits struct {
	piece    uint64 // bytes; no call goes over a multiple of it in the arena, for pieces are pinned one by one
	bytes    uint64 // of one call
	minRows  uint64 // fewer are single copies
	maxRows  uint64
	maxPitch uint64 // bytes
}

// planner keeps the buffers of plans, so that copies allocate none.
type planner struct {
	planLimits
	given, turned []span
	one, other    []rect
	isTurned      bool // the last plan does not follow the order of its spans
}

// plan makes the calls for the spans of blocks. It tries the two orders in which layouts are
// regular: as given (a block's spans together), and by the number of the span in its block (a
// layer of all blocks together).
func (p *planner) plan(spans []span, counts []cudaipc.Block) []rect {
	p.isTurned = false
	p.given = p.split(p.given[:0], spans)
	p.one = p.rects(p.one[:0], p.given)
	per := evenly(counts)
	if per < 2 || len(p.one) < 2 {
		return p.one
	}
	p.turned = turn(p.turned[:0], spans, per)
	p.given = p.split(p.given[:0], p.turned)
	p.other = p.rects(p.other[:0], p.given)
	if p.isTurned = len(p.other) < len(p.one); p.isTurned {
		return p.other
	}
	return p.one
}

// evenly returns how many spans each block has, or 0 if they differ or there is one block.
func evenly(blocks []cudaipc.Block) int {
	if len(blocks) < 2 {
		return 0
	}
	for i := range blocks {
		if blocks[i].Runs != blocks[0].Runs {
			return 0
		}
	}
	return int(blocks[0].Runs)
}

// turn orders spans by their number in the block; each block has per spans.
func turn(out, spans []span, per int) []span {
	out = slices.Grow(out, len(spans))
	for i := range per {
		for j := i; j < len(spans); j += per {
			out = append(out, spans[j])
		}
	}
	return out
}

// split merges neighbours that are contiguous on both sides, and cuts spans that are too long for
// one call or lie in two pieces.
func (p *planner) split(out, spans []span) []span {
	for i := 0; i < len(spans); {
		s := spans[i]
		for i++; i < len(spans) && follows(s, spans[i]); i++ {
			s.n += spans[i].n
		}
		for s.n > 0 {
			n := min(s.n, p.bytes, p.piece-s.off%p.piece)
			out = append(out, span{s.dev, s.off, n, s.in})
			s = span{s.dev + n, s.off + n, s.n - n, s.in}
		}
	}
	return out
}

// follows reports whether b directly follows a on both sides. An empty b follows everything.
func follows(a, b span) bool {
	return b.n == 0 || (a.dev+a.n == b.dev && a.off+a.n == b.off && a.in == b.in)
}

// rects finds runs of spans of one length at constant distances.
func (p *planner) rects(out []rect, spans []span) []rect {
	for len(spans) > 0 {
		n := p.regular(spans)
		if n < int(p.minRows) {
			out = append(out, rect{span: spans[0], rows: 1})
			spans = spans[1:]
			continue
		}
		out = append(out, rect{
			span: spans[0], rows: uint64(n),
			devPitch: spans[1].dev - spans[0].dev, offPitch: spans[1].off - spans[0].off,
		})
		spans = spans[n:]
	}
	return out
}

// regular returns how many of the first spans one rectangle can hold.
func (p *planner) regular(spans []span) int {
	if len(spans) < 2 {
		return 1
	}
	first := spans[0]
	devPitch, offPitch := spans[1].dev-first.dev, spans[1].off-first.off // a step back is a huge pitch
	if devPitch < first.n || offPitch < first.n || devPitch > p.maxPitch || offPitch > p.maxPitch {
		return 1
	}
	most := min(uint64(len(spans)), max(p.bytes/first.n, 1), p.maxRows)
	for i := uint64(1); i < most; i++ {
		s := spans[i]
		if s.n != first.n || s.in != first.in || s.dev-spans[i-1].dev != devPitch ||
			s.off-spans[i-1].off != offPitch || s.off/p.piece != first.off/p.piece {
			return int(i)
		}
	}
	return int(most)
}

package lookup

import "github.com/kvagent/kvagent/pool"

// stride is how many aligned units are pinned in each group before the next stride, so that a byte
// cap cuts all groups at about the same token.
const stride = 16

// reserve pins what longest finds. Blocks evicted in between shorten the answer.
func (p *plan) reserve(maxBytes int64, refs []pool.Ref) Hit {
	own, base := p.own(), len(refs)
	if p.single() {
		return p.reserveSingle(own, maxBytes, refs)
	}
	first := p.longest(p.limit())
	for end := first; end > own; {
		h := Hit{Refs: refs[:base]}
		got := own
		if p.pinWindows(own, end, maxBytes, &h) {
			got = p.pinFull(own, end, maxBytes, &h)
		}
		if got == end {
			h.Tokens, h.Capped = uint32(end), end < first
			return h
		}
		p.ix.Unpin(h.Refs[base:])
		refs = h.Refs[:base]
		end = p.shorter(own, got, end)
	}
	return Hit{Refs: refs[:base], Capped: first > own}
}

// shorter returns the end to try after end, of which only the blocks before got could be pinned. If
// none could be, and none was evicted meanwhile, the cap is the reason. The windows before most
// shorter ends exceed it too, so it tries half, which bounds the time of a look-up at the cap.
func (p *plan) shorter(own, got, end uint64) uint64 {
	if got > own {
		return p.longest(got)
	}
	if left := p.longest(end); left < end {
		return left
	}
	half := (end - own) / 2
	return p.longest(own + half - half%p.align())
}

// single reports whether the query has one full-attention group, which needs no second pass.
func (p *plan) single() bool {
	return p.asked() == 1 && p.s.Groups[p.group(0)].Window == 0
}

func (p *plan) reserveSingle(own uint64, maxBytes int64, refs []pool.Ref) Hit {
	g, end := p.group(0), p.limit()
	if end <= own {
		return Hit{Refs: refs}
	}
	view := p.view(g, own, end)
	n, all, bytes := p.ix.Pin(p.s.ID, g, view, maxBytes, refs)
	if n == 0 && view.N > 0 && p.stored(g, view.Slice(0, 1)) { // it is larger than maxBytes, or it came just now
		n, all, bytes = p.ix.Pin(p.s.ID, g, view, maxBytes, refs)
	}
	h := Hit{Refs: all, Bytes: bytes, Capped: n < view.N && p.stored(g, view.Slice(n, n+1))}
	if n > 0 {
		h.Tokens = uint32(own + uint64(n)*uint64(p.s.Groups[g].BlockTokens))
		if own > 0 {
			p.ix.Prefix(p.s.ID, g, p.view(g, 0, own))
		}
	}
	return h
}

func (p *plan) stored(g uint8, one pool.Hashes) bool {
	var present [1]bool
	p.ix.Exists(p.s.ID, g, one, present[:])
	return present[0]
}

// pinWindows pins the windows before end. It returns false if one is incomplete by now or exceeds
// the cap.
func (p *plan) pinWindows(own, end uint64, maxBytes int64, h *Hit) bool {
	for i := range p.asked() {
		g := p.group(i)
		if p.s.Groups[g].Window == 0 {
			continue
		}
		from := max(end-p.windowBlocks(g, end)*uint64(p.s.Groups[g].BlockTokens), own)
		if !p.pin(g, from, end, maxBytes, h) {
			return false
		}
	}
	return true
}

// pinFull pins the full-attention groups stride by stride and returns the end up to which all are
// pinned.
func (p *plan) pinFull(own, end uint64, maxBytes int64, h *Hit) uint64 {
	step := stride * p.align()
	for from := own; from < end; from += step {
		to := min(from+step, end)
		for i := range p.asked() {
			g := p.group(i)
			if p.s.Groups[g].Window == 0 && !p.pin(g, from, to, maxBytes, h) {
				return from
			}
		}
	}
	return end
}

func (p *plan) pin(g uint8, from, to uint64, maxBytes int64, h *Hit) bool {
	view := p.view(g, from, to)
	n, all, bytes := p.ix.Pin(p.s.ID, g, view, maxBytes-h.Bytes, h.Refs)
	h.Refs, h.Bytes = all, h.Bytes+bytes
	return n == view.N
}

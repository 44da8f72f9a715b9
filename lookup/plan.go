package lookup

import "github.com/kvagent/kvagent/pool"

// plan is one query against one index. Token counts are uint64 here, because hashes times tokens
// per hash may exceed 32 bits.
type plan struct {
	ix pool.Index
	s  *Space
	q  *Query
}

// asked returns the number of groups of the query, and group the i-th of them.
func (p *plan) asked() int {
	if len(p.q.Groups) == 0 {
		return len(p.s.Groups)
	}
	return len(p.q.Groups)
}

func (p *plan) group(i int) uint8 {
	if len(p.q.Groups) == 0 {
		return uint8(i)
	}
	return p.q.Groups[i]
}

// align returns the least number of tokens that is a whole number of blocks in every requested
// group.
func (p *plan) align() uint64 {
	a := uint64(1)
	for i := range p.asked() {
		b := uint64(p.s.Groups[p.group(i)].BlockTokens)
		a = a / gcd(a, b) * b
	}
	return a
}

// limit returns the most tokens that the answer may have.
func (p *plan) limit() uint64 {
	n := uint64(p.q.Tokens)
	if !p.q.AllowFull && n > 0 {
		n--
	}
	n = min(n, uint64(p.q.Hashes.N)*uint64(p.s.HashTokens))
	return n - n%p.align()
}

// own returns the engine's own prefix, rounded down to whole blocks of every requested group.
func (p *plan) own() uint64 {
	n := uint64(p.q.HBMTokens)
	return n - n%p.align()
}

// view returns the hashes of a group's blocks from token from to token to, which are block
// boundaries.
func (p *plan) view(g uint8, from, to uint64) pool.Hashes {
	b := uint64(p.s.Groups[g].BlockTokens)
	scale := int(b / uint64(p.s.HashTokens))
	h := p.q.Hashes
	h.First, h.Step, h.N = scale-1, scale, int(to/b)
	return h.Slice(int(min(from, to)/b), int(to/b))
}

// longest returns the greatest end <= limit up to which every group has what it needs; it is at
// least own if limit is.
func (p *plan) longest(limit uint64) uint64 {
	end := limit
	for i := range p.asked() {
		if g := p.group(i); p.s.Groups[g].Window == 0 {
			end = p.fullEnd(g, end)
		}
	}
	return p.windowsEnd(end - end%p.align())
}

// fullEnd returns the end of the stored chain of a full-attention group. The engine's own blocks
// need not be stored; those that are stored become as recent as the blocks after them, so that a
// chain ages from its end.
func (p *plan) fullEnd(g uint8, end uint64) uint64 {
	own := min(p.own(), end)
	n := p.ix.Prefix(p.s.ID, g, p.view(g, own, end))
	if n > 0 && own > 0 {
		p.ix.Prefix(p.s.ID, g, p.view(g, 0, own))
	}
	return own + uint64(n)*uint64(p.s.Groups[g].BlockTokens)
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

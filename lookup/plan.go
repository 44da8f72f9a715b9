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

// stored holds which blocks of a sliding-window group the index has.
type stored struct {
	group uint8
	run   []uint32 // run[i]: number of consecutive stored or own blocks right before block i
}

// windowsEnd lowers end until every sliding-window group has its window before it. Full-attention
// groups have every shorter prefix too, so they are not queried again. Each group is queried once,
// although windows that disagree lower end many times.
func (p *plan) windowsEnd(end uint64) uint64 {
	var groups []stored
	for i := range p.asked() {
		if g := p.group(i); p.s.Groups[g].Window != 0 && end > 0 {
			groups = append(groups, stored{g, p.runs(g, end)})
		}
	}
	for lowered := true; lowered; {
		lowered = false
		for i := range groups {
			if e := p.windowEnd(&groups[i], end); e < end {
				end, lowered = e, true
			}
		}
	}
	return end
}

// runs queries the index for a group's blocks before end.
func (p *plan) runs(g uint8, end uint64) []uint32 {
	all := p.view(g, 0, end)
	present := make([]bool, all.N)
	p.ix.Exists(p.s.ID, g, all, present)
	for i := range min(p.own()/uint64(p.s.Groups[g].BlockTokens), uint64(all.N)) {
		present[i] = true
	}
	run := make([]uint32, all.N+1)
	for i, ok := range present {
		if ok {
			run[i+1] = run[i] + 1
		}
	}
	return run
}

// windowEnd returns the greatest aligned end' <= end before which the group's window is stored or
// the engine's own.
func (p *plan) windowEnd(s *stored, end uint64) uint64 {
	block, align := uint64(p.s.Groups[s.group].BlockTokens), p.align()
	for ; end > 0; end -= align {
		if uint64(s.run[end/block]) >= p.windowBlocks(s.group, end) {
			return end
		}
	}
	return 0
}

// windowBlocks returns how many blocks before end the next token attends to: those that hold the
// Window-1 tokens before it (as vLLM's SlidingWindowManager counts), or all of them; of a chunk,
// those that hold its tokens before end (as its ChunkedLocalAttentionManager counts).
func (p *plan) windowBlocks(g uint8, end uint64) uint64 {
	block, w := uint64(p.s.Groups[g].BlockTokens), uint64(p.s.Groups[g].Window)
	if w > Chunked {
		return end/block - (end-end%(w-Chunked))/block
	}
	return min((w-1+block-1)/block, end/block)
}

// Package lookup computes how much of a prompt is stored, by pure rules over an index. It has no
// state, no goroutine and no clock.
package lookup

import (
	"slices"

	"github.com/kvagent/kvagent/pool"
)

// Group describes a KV cache group to the rules.
type Group struct {
	BlockTokens uint32 // a multiple of Space.HashTokens
	Window      uint32 // tokens of a sliding window, 0 for full attention; above Chunked, a chunk's
}

// Chunked is added to the tokens of a chunk in Group.Window: with chunked local attention, a token
// attends to those from the last whole number of chunks on. A peer that does not know it takes it
// for a window longer than any prompt, which needs all blocks.
const Chunked = 1 << 31

// Space describes a space to the rules.
type Space struct {
	ID         pool.SpaceID
	Print      pool.Fingerprint
	HashTokens uint32 // tokens that one hash of the query covers
	Groups     []Group
}

// Query is one look-up. Hash i covers tokens i*HashTokens to (i+1)*HashTokens-1 and, being chained,
// all before them; a group with larger blocks uses the hash at its block's end.
type Query struct {
	Hashes    pool.Hashes // Step 1
	Tokens    uint32      // length of the prompt
	HBMTokens uint32      // tokens that the engine has itself, from token 0; blocks wholly below count as stored
	Groups    []uint8     // groups asked for, each below len(Space.Groups); empty means all
	AllowFull bool        // false: at least the last token is left to compute
}

// Hit is the result of Reserve. Tokens counts from token 0 and includes HBMTokens' whole blocks; it
// is a multiple of every asked group's block size, and 0 if nothing beyond the engine's own blocks
// is stored.
type Hit struct {
	Tokens uint32
	Refs   []pool.Ref // appended to the caller's
	Bytes  int64
	Capped bool // maxBytes limited the pins and Tokens
}

// Fetched returns how many of the tokens beyond the engine's own are fetched from the node's own
// tiers, and how many from shared ones. Of several groups it is their share of all blocks. Call it
// while the blocks are pinned; t may be nil, for a pool without tiers.
func (h *Hit) Fetched(t pool.Tiers, q *Query) (own, shared uint32) {
	if t == nil || len(h.Refs) == 0 {
		return 0, 0
	}
	tokens, all := int(h.Tokens-min(h.Tokens, q.HBMTokens)), len(h.Refs)
	ownBlocks, sharedBlocks := t.Fetched(h.Refs)
	return uint32(tokens * ownBlocks / all), uint32(tokens * sharedBlocks / all)
}

// Limit returns the most tokens that the answer to a query may have: whole blocks of every
// requested group. It is 0 for a query that the space cannot answer.
func Limit(s *Space, q *Query) uint32 {
	if !q.valid(s) {
		return 0
	}
	p := plan{s: s, q: q}
	return uint32(p.limit())
}

// Longest returns the number of tokens of the prompt that every requested group has, counted as in
// Hit.Tokens. It pins nothing; the chains found count as used.
func Longest(ix pool.Index, s *Space, q *Query) uint32 {
	if !q.valid(s) {
		return 0
	}
	p := plan{ix: ix, s: s, q: q}
	end := p.longest(p.limit())
	if end <= p.own() {
		return 0
	}
	return uint32(end)
}

// Reserve does what Longest does, and pins what it found beyond the engine's own blocks, as far as
// all shards of all groups together stay within maxBytes.
func Reserve(ix pool.Index, s *Space, q *Query, maxBytes int64, refs []pool.Ref) Hit {
	if !q.valid(s) {
		return Hit{Refs: refs}
	}
	p := plan{ix: ix, s: s, q: q}
	return p.reserve(maxBytes, refs)
}

func (q *Query) valid(s *Space) bool {
	if s.HashTokens == 0 || len(s.Groups) == 0 {
		return false
	}
	for _, g := range q.Groups {
		if int(g) >= len(s.Groups) {
			return false
		}
	}
	return true
}

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

// view returns the hashes of a group's blocks from token from to token to.
func (p *plan) view(g uint8, from, to uint64) pool.Hashes { return p.s.Blocks(p.q.Hashes, g, from, to) }

// Blocks returns those of a prompt's hashes that are of a group's whole blocks from token from to
// token to.
func (s *Space) Blocks(h pool.Hashes, g uint8, from, to uint64) pool.Hashes {
	b := uint64(s.Groups[g].BlockTokens)
	scale := int(b / uint64(s.HashTokens))
	h.First, h.Step, h.N = scale-1, scale, int(to/b)
	return h.Slice(int(min(from, to)/b), int(to/b))
}

// Asks reports whether the query asks for a group.
func (q *Query) Asks(g uint8) bool { return len(q.Groups) == 0 || slices.Contains(q.Groups, g) }

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

// Expected is what may still come for a look-up that names a transfer.
type Expected struct {
	Grows bool   // more blocks may come
	Most  uint32 // tokens that they can reach
	Anew  bool   // shared tiers are to be asked again for what they lacked
}

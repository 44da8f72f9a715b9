// Package lookup computes how much of a prompt is stored, by pure rules over an index. It has no
// state, no goroutine and no clock.
package lookup

import "github.com/kvagent/kvagent/pool"

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

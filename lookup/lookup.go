// Package lookup answers how much of a prompt is stored: pure rules over an index. It has no state, no
// goroutine and no clock.
package lookup

import "github.com/kvagent/kvagent/pool"

// Group is what the rules need to know of a KV cache group.
type Group struct {
	BlockTokens uint32 // a multiple of Space.HashTokens
	Window      uint32 // tokens of a sliding window, 0 for full attention
}

// Space is what the rules need to know of a space.
type Space struct {
	ID         pool.SpaceID
	HashTokens uint32 // tokens one hash of the query stands for
	Groups     []Group
}

// Query is one question. Hash i stands for tokens i*HashTokens to (i+1)*HashTokens-1 and, being chained, for all
// before it; a group with larger blocks uses the hash at its block's end.
type Query struct {
	Hashes    pool.Hashes
	Tokens    uint32  // length of the prompt
	HBMTokens uint32  // tokens the engine has itself, from token 0; blocks wholly below count as present
	Groups    []uint8 // groups asked for; empty means all
	AllowFull bool    // false: at least the last token is left to compute
}

// Hit is what a Reserve found and pinned. Tokens counts from token 0 and includes HBMTokens' whole blocks; it is
// a multiple of every asked group's block size, and 0 where nothing beyond the engine's own blocks is stored.
type Hit struct {
	Tokens uint32
	Refs   []pool.Ref // appended to what the caller gave
	Bytes  int64
	Capped bool // maxBytes cut the pins: Tokens is what is pinned
}

// Package evictsim drives an eviction policy over a stream of requests like a pool, and counts its
// hits. It also has exact LRU, the clairvoyant optimum, and generators of streams.
package evictsim

// Request is one prompt: its arrival in ms and its blocks. Equal numbers mean that the block and
// all before it are equal.
type Request struct {
	Millis int64
	Blocks []uint32
}

// Stream is a list of requests by time. Blocks are numbered from 0 to below Blocks.
type Stream struct {
	Name     string
	Requests []Request
	Blocks   int
	HashSeed uint64 // of the hashes of blocks, which slightly influence what a policy decides

	BlockTokens uint32 // of a block; 0: BlockTokens
}

// Looked returns the number of blocks looked up.
func (s *Stream) Looked() (n int) {
	for i := range s.Requests {
		n += len(s.Requests[i].Blocks)
	}
	return n
}

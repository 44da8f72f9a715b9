// Package evictsim drives an eviction policy over a stream of requests, the way a pool would, and
// says how many blocks it hit; beside it exact LRU and the clairvoyant optimum, and generators of
// streams.
package evictsim

// Request is one prompt: its arrival in ms and its blocks, numbers that are equal when the block
// and all before it are.
type Request struct {
	Millis int64
	Blocks []uint32
}

// Stream is requests by time. Blocks are numbered from 0 to below Blocks.
type Stream struct {
	Name     string
	Requests []Request
	Blocks   int
	HashSeed uint64 // of the hashes of blocks. What a policy decides depends a little on them
}

// Looked is the number of blocks looked up.
func (s *Stream) Looked() (n int) {
	for i := range s.Requests {
		n += len(s.Requests[i].Blocks)
	}
	return n
}

// Package evictsim drives an eviction policy over a stream of requests like a pool, and counts its
// hits. It also has exact LRU, the clairvoyant optimum, and generators of streams.
package evictsim

import (
	"fmt"

	"github.com/kvagent/kvagent/trace"
)

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
}

// Looked returns the number of blocks looked up.
func (s *Stream) Looked() (n int) {
	for i := range s.Requests {
		n += len(s.Requests[i].Blocks)
	}
	return n
}

// ReadTrace reads the stream of a trace, whose blocks it numbers in order. Some requests, not all,
// may have no blocks.
func ReadTrace(path string) (*Stream, error) {
	requests, err := trace.Read(path, 0)
	if err != nil {
		return nil, err
	}
	s, number := &Stream{Name: path, Requests: make([]Request, len(requests))}, map[uint64]uint32{}
	for i := range requests {
		s.Requests[i] = Request{Millis: int64(requests[i].Timestamp), Blocks: numbered(number, requests[i].HashIDs)}
	}
	if s.Blocks = len(number); s.Blocks == 0 {
		return nil, fmt.Errorf("%s: no hash_ids in %d requests, must be one at least", path, len(requests))
	}
	return s, nil
}

// numbered returns the numbers of blocks, and numbers new ones.
func numbered(number map[uint64]uint32, ids []uint64) []uint32 {
	blocks := make([]uint32, len(ids))
	for i, id := range ids {
		n, ok := number[id]
		if !ok {
			n = uint32(len(number))
			number[id] = n
		}
		blocks[i] = n
	}
	return blocks
}

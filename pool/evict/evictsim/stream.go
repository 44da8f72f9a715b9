// Package evictsim drives an eviction policy over a stream of requests like a pool, and counts its
// hits. It also has exact LRU, the clairvoyant optimum, and generators of streams.
package evictsim

import (
	"fmt"
	"math"
	"os"
	"path/filepath"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/trace"
)

// Request is one prompt: its arrival in ms and its blocks. Equal numbers mean that the block and
// all before it are equal.
type Request struct {
	Millis int64
	Blocks []uint32
	Output uint32 // tokens generated; 0: not told
	Finish pool.Finish
}

// Stream is a list of requests by time. Blocks are numbered from 0 to below Blocks.
type Stream struct {
	Name     string
	Requests []Request
	Told     []Told // by time
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

// finishes are the reasons for which requests end, as traces name them.
var finishes = map[string]pool.Finish{
	"stop": pool.FinishStop, "length": pool.FinishLength, "tool_calls": pool.FinishTool, "abort": pool.FinishAbort,
}

// ReadTrace reads the stream of a trace, or of a recording: a folder of traces, one after another
// in the order of their names. It numbers blocks in order. Some requests, not all, may have no
// blocks.
func ReadTrace(path string) (*Stream, error) {
	files := []string{path}
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		if files, _ = filepath.Glob(filepath.Join(path, "*.jsonl")); len(files) == 0 {
			return nil, fmt.Errorf("%s: no trace in it, must have files named *.jsonl", path)
		}
	}
	var requests []trace.Request
	for _, file := range files {
		more, err := trace.Read(file, 0)
		if err != nil {
			return nil, err
		}
		requests = append(requests, more...)
	}
	s, number := &Stream{Name: path, Requests: make([]Request, len(requests))}, map[uint64]uint32{}
	most := 1.0
	for i := range requests {
		r := &requests[i]
		s.Requests[i] = Request{Millis: int64(r.Timestamp), Blocks: numbered(number, r.HashIDs)}
		s.Requests[i].Finish = finishes[r.FinishReason]
		if out, err := r.OutputLength.Within(0, math.MaxInt32, 0); err == nil {
			s.Requests[i].Output = uint32(out)
		}
		tokens, err := r.InputLength.Within(0, math.MaxInt32, 0)
		if n := len(r.HashIDs); n > 0 && err == nil {
			most = max(most, math.Ceil(float64(tokens)/float64(n)))
		}
	}
	if most > 1 { // else the trace does not tell
		s.BlockTokens = 1 << int(math.Round(math.Log2(most))) // a prompt's last block may be partial
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

// Package evictsim drives an eviction policy over a stream of requests, the way a pool would, and says how many
// blocks it hit; beside it exact LRU and the clairvoyant optimum, and generators of streams.
package evictsim

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
)

// Request is one prompt: its arrival in ms and its blocks, numbers that are equal when the block and all before it are.
type Request struct {
	Millis int64
	Blocks []uint32
}

// Stream is requests by time. Blocks are numbered from 0 to below Blocks.
type Stream struct {
	Name     string
	Requests []Request
	Blocks   int
}

// Looked is the number of blocks looked up.
func (s *Stream) Looked() (n int) {
	for i := range s.Requests {
		n += len(s.Requests[i].Blocks)
	}
	return n
}

// ReadTrace reads Mooncake's format: one JSON object per line with timestamp in ms and hash_ids.
func ReadTrace(path string) (*Stream, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	s := &Stream{Name: path}
	number := map[int64]uint32{}
	in := bufio.NewReaderSize(f, 1<<16)
	for line := 1; ; line++ {
		text, err := in.ReadBytes('\n')
		if len(text) > 0 {
			if err := s.add(text, number); err != nil {
				return nil, fmt.Errorf("%s:%d: %w", path, line, err)
			}
		}
		if err == io.EOF {
			s.Blocks = len(number)
			return s, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

func (s *Stream) add(text []byte, number map[int64]uint32) error {
	var r struct {
		Timestamp int64   `json:"timestamp"`
		HashIDs   []int64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(text, &r); err != nil {
		return err
	}
	req := Request{Millis: r.Timestamp, Blocks: make([]uint32, len(r.HashIDs))}
	for i, id := range r.HashIDs {
		n, ok := number[id]
		if !ok {
			n = uint32(len(number))
			number[id] = n
		}
		req.Blocks[i] = n
	}
	s.Requests = append(s.Requests, req)
	return nil
}

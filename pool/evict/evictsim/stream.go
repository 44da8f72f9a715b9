// Package evictsim drives an eviction policy over a stream of requests, the way a pool would, and says how many
// blocks it hit; beside it exact LRU and the clairvoyant optimum, and generators of streams.
package evictsim

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
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

const (
	maxMillis = 9_000_000_000_000 // of a timestamp, so that it can be told in ns
	maxHashes = 1 << 20           // of a request
)

// ReadTrace reads Mooncake's format: one JSON object per line with timestamp in ms, never before that of the line before,
// and hash_ids. Errors name the line and the field.
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
			break
		}
		if err != nil {
			return nil, err
		}
	}
	if s.Blocks = len(number); s.Blocks == 0 {
		return nil, fmt.Errorf("%s: no hash_ids in %d requests, must be one at least", path, len(s.Requests))
	}
	return s, nil
}

// traceLine is a line of a trace. What is nil is not there.
type traceLine struct {
	Timestamp *int64  `json:"timestamp"` // ms
	HashIDs   []int64 `json:"hash_ids"`
}

func (s *Stream) add(text []byte, number map[int64]uint32) error {
	var l traceLine
	if err := json.Unmarshal(text, &l); err != nil {
		return err
	}
	if err := s.check(&l); err != nil {
		return err
	}
	req := Request{Millis: *l.Timestamp, Blocks: make([]uint32, len(l.HashIDs))}
	for i, id := range l.HashIDs {
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

// check says what is wrong with the next line.
func (s *Stream) check(l *traceLine) error {
	switch {
	case l.Timestamp == nil:
		return errors.New("timestamp is missing")
	case l.HashIDs == nil:
		return errors.New("hash_ids is missing")
	case *l.Timestamp < 0 || *l.Timestamp > maxMillis:
		return fmt.Errorf("timestamp is %d, must be 0 to %d", *l.Timestamp, int64(maxMillis))
	case len(l.HashIDs) > maxHashes:
		return fmt.Errorf("hash_ids has %d numbers, must have at most %d", len(l.HashIDs), maxHashes)
	}
	if n := len(s.Requests); n > 0 && *l.Timestamp < s.Requests[n-1].Millis {
		return fmt.Errorf("timestamp is %d, must be at least %d, as on the line before", *l.Timestamp, s.Requests[n-1].Millis)
	}
	for i, id := range l.HashIDs {
		if id < 0 {
			return fmt.Errorf("hash_ids[%d] is %d, must be 0 to %d", i, id, int64(math.MaxInt64))
		}
	}
	return nil
}

package evictsim

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
)

const (
	maxMillis = 9_000_000_000_000 // of a timestamp, so that it can be told in ns
	maxHashes = 1 << 20           // of a request
)

// ReadTrace reads Mooncake's format: one JSON object per line with timestamp, in ms and with a fraction if need be, and hash_ids.
// Requests come in the order of their time, those of one ms in that of their lines; empty lines and other fields are passed over.
// Errors name the line, the field and what it may be.
func ReadTrace(path string) (*Stream, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r := traceReader{stream: &Stream{Name: path}, number: map[int64]uint32{}}
	in := bufio.NewReaderSize(f, 1<<16)
	for line := 1; ; line++ {
		text, err := in.ReadBytes('\n')
		if len(bytes.TrimSpace(text)) > 0 {
			if err := r.add(text); err != nil {
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
	return r.end()
}

// traceReader numbers the blocks of a trace in the order they come.
type traceReader struct {
	stream *Stream
	number map[int64]uint32
}

// traceLine is a line of a trace. What is nil is not there.
type traceLine struct {
	Timestamp *float64 `json:"timestamp"` // ms
	HashIDs   []int64  `json:"hash_ids"`
}

func (r *traceReader) add(text []byte) error {
	var l traceLine
	if err := json.Unmarshal(text, &l); err != nil {
		return wrongType(err)
	}
	if err := l.check(); err != nil {
		return err
	}
	req := Request{Millis: int64(*l.Timestamp), Blocks: make([]uint32, len(l.HashIDs))}
	for i, id := range l.HashIDs {
		n, ok := r.number[id]
		if !ok {
			n = uint32(len(r.number))
			r.number[id] = n
		}
		req.Blocks[i] = n
	}
	r.stream.Requests = append(r.stream.Requests, req)
	return nil
}

// wrongType says of an error of JSON's types which field it is and what that may be.
func wrongType(err error) error {
	var wrong *json.UnmarshalTypeError
	if !errors.As(err, &wrong) {
		return err
	}
	switch wrong.Field {
	case "timestamp":
		return fmt.Errorf("timestamp is a %s, must be a number from 0 to %d", wrong.Value, int64(maxMillis))
	case "hash_ids":
		return fmt.Errorf("hash_ids is or has a %s, must be a list of integers from 0 to %d", wrong.Value, int64(math.MaxInt64))
	}
	return err
}

func (l *traceLine) check() error {
	switch {
	case l.Timestamp == nil:
		return errors.New("timestamp is missing")
	case l.HashIDs == nil:
		return errors.New("hash_ids is missing")
	case *l.Timestamp < 0 || *l.Timestamp > maxMillis:
		return fmt.Errorf("timestamp is %v, must be 0 to %d", *l.Timestamp, int64(maxMillis))
	case len(l.HashIDs) > maxHashes:
		return fmt.Errorf("hash_ids has %d numbers, must have at most %d", len(l.HashIDs), maxHashes)
	}
	for i, id := range l.HashIDs {
		if id < 0 {
			return fmt.Errorf("hash_ids[%d] is %d, must be 0 to %d", i, id, int64(math.MaxInt64))
		}
	}
	return nil
}

// end is the stream of all lines.
func (r *traceReader) end() (*Stream, error) {
	s := r.stream
	if s.Blocks = len(r.number); s.Blocks == 0 {
		return nil, fmt.Errorf("%s: no hash_ids in %d requests, must be one at least", s.Name, len(s.Requests))
	}
	slices.SortStableFunc(s.Requests, func(a, b Request) int { return cmp.Compare(a.Millis, b.Millis) })
	return s, nil
}

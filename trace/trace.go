// Package trace reads traces of requests in Mooncake's format: JSON, an object a line.
package trace

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
	"strconv"
)

// Limits of a trace. Beyond one, it is refused with its line.
const (
	MaxLine     = 32 << 20          // bytes
	MaxRequests = 10_000_000        // requests of a trace
	MaxBlocks   = 1 << 20           // blocks of a prompt
	MaxMillis   = 9_000_000_000_000 // ms of a timestamp, so that it fits in ns
)

// Request is a line of a trace. HashIDs has a number for each block of the prompt, equal when the
// block and all before it are equal; it may be empty.
type Request struct {
	Line      int     // of the file, from 1 on
	Timestamp float64 // ms
	HashIDs   []uint64

	InputLength, OutputLength Tokens
	FinishReason              string // as in the OpenAI API; empty if the trace does not tell
}

// Read reads the first limit requests of a file, all with limit 0, and returns them in the order of
// their time, those of one time in the order of their lines. It skips empty lines and other fields.
// Errors name the file, the line, the field and what it may be.
func Read(path string, limit int) ([]Request, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return Parse(f, path, limit)
}

// Parse is Read from a reader; errors call it by name.
func Parse(r io.Reader, name string, limit int) (all []Request, err error) {
	in := bufio.NewScanner(r)
	in.Buffer(make([]byte, 64<<10), MaxLine)
	line := 0
	for (limit <= 0 || len(all) < limit) && in.Scan() {
		line++
		text := bytes.TrimSpace(in.Bytes())
		if len(text) == 0 {
			continue
		}
		if len(all) == MaxRequests {
			return nil, fmt.Errorf("%s:%d: more than %d requests", name, line, MaxRequests)
		}
		req, err := parseLine(text)
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", name, line, err)
		}
		req.Line = line
		all = append(all, req)
	}
	if err := in.Err(); errors.Is(err, bufio.ErrTooLong) {
		return nil, fmt.Errorf("%s:%d: the line is longer than %d bytes", name, line+1, MaxLine)
	} else if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	slices.SortStableFunc(all, func(a, b Request) int { return cmp.Compare(a.Timestamp, b.Timestamp) })
	return all, nil
}

// shownBytes is how many bytes of a wrong value an error shows.
const shownBytes = 40

// line is a line of a trace. Absent fields are nil.
type line struct {
	Timestamp    *float64        `json:"timestamp"` // ms
	HashIDs      json.RawMessage `json:"hash_ids"`
	InputLength  json.RawMessage `json:"input_length"`
	OutputLength json.RawMessage `json:"output_length"`
	FinishReason string          `json:"finish_reason"`
}

func parseLine(text []byte) (Request, error) {
	var l line
	if err := json.Unmarshal(text, &l); err != nil {
		return Request{}, wrongType(err)
	}
	switch {
	case l.Timestamp == nil:
		return Request{}, errors.New("timestamp is missing, must be a number of ms")
	case *l.Timestamp < 0 || *l.Timestamp > MaxMillis:
		return Request{}, fmt.Errorf("timestamp is %v, must be 0 to %d", *l.Timestamp, int64(MaxMillis))
	}
	ids, err := parseHashes(l.HashIDs)
	return Request{
		Timestamp: *l.Timestamp, HashIDs: ids,
		InputLength:  Tokens{"input_length", string(l.InputLength)},
		OutputLength: Tokens{"output_length", string(l.OutputLength)}, FinishReason: l.FinishReason,
	}, err
}

// wrongType converts an error of encoding/json about a type to one that names the field and what it
// may be.
func wrongType(err error) error {
	var wrong *json.UnmarshalTypeError
	if !errors.As(err, &wrong) {
		return err
	}
	if wrong.Field == "" {
		return fmt.Errorf("the line is a %s, must be an object", wrong.Value)
	}
	return fmt.Errorf("%s is a %s, must be a number from 0 to %d", wrong.Field, wrong.Value, int64(MaxMillis))
}

// parseHashes reads hash_ids. It looks for null, which encoding/json accepts as a number, only if
// the text contains it.
func parseHashes(text json.RawMessage) (ids []uint64, err error) {
	switch {
	case len(text) == 0 || bytes.Equal(text, []byte("null")):
		return nil, errors.New("hash_ids is missing, must be a list of integers")
	case json.Unmarshal(text, &ids) != nil || bytes.Contains(text, []byte("null")):
		return nil, wrongHashes(text)
	case len(ids) > MaxBlocks:
		return nil, fmt.Errorf("hash_ids has %d numbers, must have at most %d", len(ids), MaxBlocks)
	}
	return ids, nil
}

// wrongHashes returns an error that says what is wrong in hash_ids.
func wrongHashes(text json.RawMessage) error {
	var all []json.RawMessage
	if json.Unmarshal(text, &all) != nil {
		return fmt.Errorf("hash_ids is %s, must be a list of integers", shown(text))
	}
	for i, one := range all {
		if _, err := strconv.ParseUint(string(one), 10, 64); err != nil {
			return fmt.Errorf("hash_ids[%d] is %s, must be an integer from 0 to %d", i, shown(one),
				uint64(math.MaxUint64))
		}
	}
	return fmt.Errorf("hash_ids is %s, must be a list of integers", shown(text))
}

func shown(text []byte) string {
	if len(text) > shownBytes {
		return string(text[:shownBytes]) + "..."
	}
	return string(text)
}

// Tokens is a number of tokens as it was written. It is checked only when it is used, so a reader
// of the blocks alone reads traces without it too.
type Tokens struct{ field, text string }

// Within returns the number; missing if it is absent. Anything else than an integer from least to
// most is an error.
func (t Tokens) Within(least, most, missing int) (int, error) {
	if t.text == "" || t.text == "null" {
		return missing, nil
	}
	n, err := strconv.ParseFloat(t.text, 64)
	if err != nil || n != math.Trunc(n) || n < float64(least) || n > float64(most) {
		return 0, fmt.Errorf("%s is %s, must be an integer from %d to %d", t.field, shown([]byte(t.text)), least, most)
	}
	return int(n), nil
}

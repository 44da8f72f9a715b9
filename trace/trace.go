// Package trace reads traces of requests in Mooncake's format: JSON, an object a line.
package trace

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
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

package mockengine

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
)

// Limits of a trace. Beyond one, the trace is refused with its line.
const (
	MaxTraceLine    = 1 << 20 // bytes
	MaxTraceBlocks  = 8192    // blocks of one prompt
	MaxTraceOutput  = 1 << 20 // tokens of one answer
	TraceBlock      = 512     // tokens one hash id of a trace stands for
	maxTraceRecords = 10_000_000
)

// Record is one request of a trace in Mooncake's format. HashIDs has one number for each TraceBlock tokens of the
// prompt, equal when the block and all before it are equal.
type Record struct {
	Timestamp    float64  `json:"timestamp"` // ms
	InputLength  int      `json:"input_length"`
	OutputLength int      `json:"output_length"`
	HashIDs      []uint64 `json:"hash_ids"`
}

// ReadTrace reads the first limit records of a trace, all with limit 0.
func ReadTrace(path string, limit int) ([]Record, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	records, err := ParseTrace(f, limit)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return records, nil
}

// ParseTrace is ReadTrace from a reader. Timestamps must not go back.
func ParseTrace(r io.Reader, limit int) ([]Record, error) {
	in := bufio.NewScanner(r)
	in.Buffer(make([]byte, 64<<10), MaxTraceLine)
	var records []Record
	for line := 1; in.Scan(); line++ {
		if len(in.Bytes()) == 0 {
			continue
		}
		if limit > 0 && len(records) == limit {
			return records, nil
		}
		rec, err := parseRecord(in.Bytes())
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		if n := len(records); n > 0 && rec.Timestamp < records[n-1].Timestamp {
			return nil, fmt.Errorf("line %d: timestamp %v is before the line before it", line, rec.Timestamp)
		}
		if len(records) == maxTraceRecords {
			return nil, fmt.Errorf("line %d: more than %d requests", line, maxTraceRecords)
		}
		records = append(records, rec)
	}
	return records, in.Err()
}

func parseRecord(line []byte) (Record, error) {
	var rec Record
	if err := json.Unmarshal(line, &rec); err != nil {
		return rec, err
	}
	switch n := len(rec.HashIDs); {
	case n == 0 || n > MaxTraceBlocks:
		return rec, fmt.Errorf("hash_ids has %d numbers, allowed are 1 to %d", n, MaxTraceBlocks)
	case rec.InputLength < 1 || rec.InputLength > n*TraceBlock:
		return rec, fmt.Errorf("input_length is %d, allowed are 1 to %d with %d hash_ids", rec.InputLength, n*TraceBlock, n)
	case rec.OutputLength < 0 || rec.OutputLength > MaxTraceOutput:
		return rec, fmt.Errorf("output_length is %d, allowed are 0 to %d", rec.OutputLength, MaxTraceOutput)
	case rec.Timestamp < 0:
		return rec, fmt.Errorf("timestamp is %v, allowed are 0 and more", rec.Timestamp)
	}
	return rec, nil
}

// DrawTrace draws n requests: conversations whose turns repeat what was said and go on.
func DrawTrace(seed uint64, n int) []Record {
	rng := rand.New(rand.NewPCG(seed, 5))
	var past [][]uint64
	records := make([]Record, n)
	next := uint64(1)
	for i := range records {
		var ids []uint64
		if len(past) > 0 && rng.IntN(3) > 0 {
			ids = append(ids, past[rng.IntN(len(past))]...)
		}
		for k := 1 + rng.IntN(8); k > 0 && len(ids) < 64; k-- {
			ids = append(ids, next)
			next++
		}
		past = append(past, ids)
		records[i] = Record{Timestamp: float64(i) * 300, InputLength: len(ids) * TraceBlock, OutputLength: 1 + rng.IntN(600), HashIDs: ids}
	}
	return records
}

package mockengine

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/rand/v2"

	"github.com/kvagent/kvagent/trace"
)

// Limits of what is replayed. Beyond one, the trace is refused with its line.
const (
	MaxTraceBlocks = 8192    // blocks of one prompt
	MaxTraceOutput = 1 << 20 // tokens of one answer
	TraceBlock     = 512     // tokens one hash id of a trace stands for
)

// Record is one request of a trace. HashIDs has one number for each TraceBlock tokens of the
// prompt, at least one, equal when the block and all before it are equal.
type Record struct {
	Timestamp    float64 // ms
	InputLength  int     // tokens
	OutputLength int     // tokens
	HashIDs      []uint64
}

// ReadTrace reads the first limit requests of a trace, all with limit 0, in the order of their
// time. It skips requests without blocks.
func ReadTrace(path string, limit int) ([]Record, error) {
	requests, err := trace.Read(path, limit)
	if err != nil {
		return nil, err
	}
	return recordsOf(requests, path)
}

// recordsOf returns the requests of a trace that have blocks.
func recordsOf(requests []trace.Request, path string) (records []Record, err error) {
	for i := range requests {
		if len(requests[i].HashIDs) == 0 {
			continue
		}
		rec, err := recordOf(&requests[i])
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, requests[i].Line, err)
		}
		records = append(records, rec)
	}
	return records, nil
}

// recordOf returns a request with blocks. Without a length it has whole blocks, and no answer.
func recordOf(r *trace.Request) (rec Record, err error) {
	n := len(r.HashIDs)
	if n > MaxTraceBlocks {
		return rec, fmt.Errorf("hash_ids has %d numbers, must have at most %d", n, MaxTraceBlocks)
	}
	rec = Record{Timestamp: r.Timestamp, HashIDs: r.HashIDs}
	if rec.InputLength, err = r.InputLength.Within(1, n*TraceBlock, n*TraceBlock); err != nil {
		return rec, fmt.Errorf("%w with %d hash_ids", err, n)
	}
	rec.OutputLength, err = r.OutputLength.Within(0, MaxTraceOutput, 0)
	return rec, err
}

// DrawTrace draws n requests: conversations whose turns repeat what was said and continue it.
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
		records[i] = Record{Timestamp: float64(i) * 300, InputLength: len(ids) * TraceBlock,
			OutputLength: 1 + rng.IntN(600), HashIDs: ids}
	}
	return records
}

// Hash is a block hash: SHA-256 over the parent's hash and the block's tokens, so it certifies the
// whole prefix.
type Hash [sha256.Size]byte

// placeholder stands for a token that the scheduler counts but does not know yet. A hash over one
// names bytes that cannot be asked for, or, worse, that differ from what it says.
const placeholder = ^uint32(0)

// promptTokens writes the n tokens of a trace's hash id.
func promptTokens(dst []uint32, id uint64) {
	x := mix(id + 1)
	for i := range dst {
		dst[i] = uint32(mix(x+uint64(i)) >> 33)
	}
}

// outputTokens writes the answer's tokens from index from on; they depend on the request alone, so
// a request that runs again gives the same answer.
func outputTokens(dst []uint32, request uint64, from int) {
	x := mix(^request)
	for i := range dst {
		dst[i] = uint32(mix(x+uint64(from+i)) >> 33)
	}
}

// hasher chains block hashes; it holds the buffer of one goroutine.
type hasher struct{ buf []byte }

func (h *hasher) next(parent *Hash, tokens []uint32) Hash {
	h.buf = append(h.buf[:0], parent[:]...)
	for _, t := range tokens {
		h.buf = binary.LittleEndian.AppendUint32(h.buf, t)
	}
	return sha256.Sum256(h.buf)
}

// mix is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

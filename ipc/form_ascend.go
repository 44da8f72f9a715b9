package ipc

import (
	"encoding/binary"
	"math"
)

// AscendStore's forms: token_len, [groups, [hbm_hit_tokens,]] hashes. The arrays may come from any
// msgpack encoder, so any valid encoding is read, not only the shortest.

func (p *Parser) parseAscend(w *wire, f *Frames, r *LookupRequest) {
	r.Tokens = uint64(binary.BigEndian.Uint32(f.At(0)))
	if r.Form != FormAscend2 {
		r.Groups = p.looseGroups(w, f.At(1))
	}
	if r.Form == FormAscend4 {
		hbm := f.At(2)
		if len(hbm) != 4 {
			w.fail("hbm_hit_tokens", "%d bytes, allowed is 4", len(hbm))
			return
		}
		r.HBMTokens = binary.BigEndian.Uint32(hbm)
	}
	if w.err == nil {
		r.HashLen, r.Hashes = p.looseHashes(w, f.At(f.Len()-1))
	}
}

// looseGroups reads the array of groups; an empty one means [0].
func (p *Parser) looseGroups(w *wire, b []byte) []uint8 {
	n, rest := looseArray(w, "groups", b, MaxGroups)
	for i := 0; i < n && w.err == nil; i++ {
		v, size := looseUint(rest)
		switch {
		case size <= 0:
			w.fail("groups", "element %d is no uint", i)
		case v > math.MaxUint8:
			w.fail("groups", "%d, allowed is 0 to %d", v, math.MaxUint8)
		default:
			p.groups[i], rest = uint8(v), rest[size:]
		}
	}
	if w.err == nil && len(rest) > 0 {
		w.fail("groups", "%d bytes after the array", len(rest))
	}
	if n == 0 {
		p.groups[0], n = 0, 1
	}
	return p.groups[:n]
}

// looseHashes reads the array of hex strings into the parser's buffer, without an allocation for
// each hash.
func (p *Parser) looseHashes(w *wire, b []byte) (length int, hashes []byte) {
	n, b := looseArray(w, "hashes", b, MaxHashes)
	if w.err != nil {
		return 0, nil
	}
	if n > 0 {
		size, header := strHeader.read(b, true)
		if header <= 0 {
			w.fail("hashes", "element 0 is no str")
			return 0, nil
		}
		if size == 0 || size > 2*MaxHashLen || size%2 != 0 {
			w.fail("hashes", "hash 0 has %d digits, allowed is an even number from 2 to %d", size,
				2*MaxHashLen)
			return 0, nil
		}
		length = int(size / 2)
	}
	need := n * length // at most len(b): each hash is twice as long there
	if need > len(b) {
		w.fail("hashes", "%d hashes, only %d bytes left in the message", n, len(b))
		return 0, nil
	}
	if cap(p.hashes) < need {
		p.hashes = make([]byte, need)
	}
	hashes = p.hashes[:need]
	for i := range n {
		if b = looseHash(w, i, b, hashes[i*length:(i+1)*length]); w.err != nil {
			return 0, nil
		}
	}
	if len(b) > 0 {
		w.fail("hashes", "%d bytes after the array", len(b))
	}
	return length, hashes
}

// looseHash reads one hex string into hash, and returns the bytes after it.
func looseHash(w *wire, i int, b, hash []byte) []byte {
	digits, header := strHeader.read(b, true)
	switch {
	case header <= 0:
		w.fail("hashes", "element %d is no str", i)
	case digits != uint64(2*len(hash)):
		w.fail("hashes", "hash %d has %d digits, the first has %d", i, digits, 2*len(hash))
	case uint64(len(b)-header) < digits:
		w.fail("hashes", "the message ends within hash %d", i)
	case !unhex(hash, b[header:header+int(digits)]):
		w.fail("hashes", "hash %d has a digit that is not 0-9 or a-f", i)
	default:
		return b[header+int(digits):]
	}
	return nil
}

func looseArray(w *wire, field string, b []byte, most int) (n int, rest []byte) {
	v, size := arrayHeader.read(b, true)
	if size <= 0 {
		w.fail(field, "no array")
		return 0, nil
	}
	if n, ok := w.length(field, "elements", v, 0, most); ok {
		return n, b[size:]
	}
	return 0, nil
}

// looseUint reads a number that is not negative in any integer encoding, including the signed ones.
func looseUint(b []byte) (v uint64, n int) {
	if len(b) == 0 {
		return 0, cutShort
	}
	c := b[0]
	switch {
	case c < 0x80:
		return uint64(c), 1
	case c >= mpUint8 && c <= mpUint64:
		return bigEndian(b, 1<<(c-mpUint8), 0)
	case c >= mpInt8 && c <= mpInt64:
		size := 1 << (c - mpInt8)
		if v, n = bigEndian(b, size, 0); n > 0 && v>>(8*size-1) != 0 {
			return 0, wrongType // negative
		}
		return v, n
	}
	return 0, wrongType
}

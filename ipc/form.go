package ipc

import (
	"encoding/binary"
	"math"
	"time"
)

// DefaultLookupDeadline applies to a request without a deadline.
const DefaultLookupDeadline = time.Millisecond

const (
	ownMinBytes    = 9 // a shorter frame is of another form
	upstreamLookup = "lookup"
	upstreamReset  = "reset"
)

var formNames = [...]string{FormMalformed: "malformed", FormOwn: "own", FormUpstream: "upstream", FormReset: "reset",
	FormAscend2: "ascend2", FormAscend3: "ascend3", FormAscend4: "ascend4", FormSimple: "simple"}

func (f Form) String() string {
	if int(f) < len(formNames) {
		return formNames[f]
	}
	return "unknown"
}

// Deadline returns how long the answer may take after the request's receipt.
func (r *LookupRequest) Deadline() time.Duration {
	if r.DeadlineUS == 0 {
		return DefaultLookupDeadline
	}
	return time.Duration(r.DeadlineUS) * time.Microsecond
}

// detectForm returns the form of a message of n frames. size is the length of frame 0; head is at
// least its first few bytes.
func detectForm(n int, head []byte, size int) Form {
	switch {
	case n == 1 && size >= ownMinBytes && head[0] == mpArray|ownFields:
		return FormOwn
	case n == 4 && size == len(upstreamLookup) && string(head) == upstreamLookup:
		return FormUpstream
	case n == 1 && size == len(upstreamReset) && string(head) == upstreamReset:
		return FormReset
	case size == 4 && n >= 2 && n <= 4:
		return FormAscend2 + Form(n-2)
	case n >= 1 && size == 8:
		return FormSimple
	}
	return FormMalformed
}

// Parser reads look-up requests of all forms. It owns the memory that a request may point to until
// the next Parse.
type Parser struct {
	hashes []byte
	groups [MaxGroups]uint8
}

// Parse reads f into r, whose slices then lie in f.Buf or in the parser. After an error, a
// *MalformedError, only r.Form is valid: the form to answer in.
func (p *Parser) Parse(f *Frames, r *LookupRequest) error {
	*r = LookupRequest{}
	w := wire{decoding: true, message: "look-up"}
	if f.Len() == 0 {
		w.fail("", "no frame, allowed is 1 to %d", MaxLookupFrames)
		return w.err
	}
	head := f.At(0)
	r.Form = detectForm(f.Len(), head, len(head))
	w.message = r.Form.String()
	if f.Len() > MaxLookupFrames || f.Bytes() > MaxLookupBytes {
		w.fail("", "%d frames, %d bytes, allowed is 1 to %d and %d", f.Len(), f.Bytes(),
			MaxLookupFrames, MaxLookupBytes)
		return w.err
	}
	switch r.Form {
	case FormOwn:
		w.buf = head
		r.walkOwn(&w)
	case FormUpstream:
		parseUpstream(&w, f, r)
	case FormReset:
	case FormSimple:
		parseSimple(&w, f, r)
	case FormAscend2, FormAscend3, FormAscend4:
		p.parseAscend(&w, f, r)
	default:
		w.fail("", "%d frames, the first of %d bytes, fit no form", f.Len(), len(head))
	}
	if w.err != nil {
		return w.err
	}
	return nil
}

// checkHashes checks the length of the joined hashes; HashLen may be 0 only without hashes.
func (r *LookupRequest) checkHashes(w *wire) {
	if w.err != nil {
		return
	}
	n := r.HashLen
	if n < 0 || n > MaxHashLen || n == 0 && len(r.Hashes) > 0 {
		w.fail("hash_len", "%d, allowed is 1 to %d, or 0 without hashes", n, MaxHashLen)
		return
	}
	if n > 0 && len(r.Hashes)%n != 0 {
		w.fail("hashes", "%d bytes, no multiple of hash_len %d", len(r.Hashes), n)
		return
	}
	if n > 0 && len(r.Hashes)/n > MaxHashes {
		w.fail("hashes", "%d hashes, allowed is 0 to %d", len(r.Hashes)/n, MaxHashes)
	}
}

// ownFields are the fields of an own request, whose first byte says so.
const ownFields = 13

// walkOwn walks the fields of docs/PROTOCOL.md section 2.1.
func (r *LookupRequest) walkOwn(w *wire) {
	w.array("", ownFields, ownFields, ownFields)
	version := uint8(Version)
	num(w, "version", &version, Version, Version)
	w.bin16("space", &r.Space)
	num(w, "session", &r.Session, 0, math.MaxUint64)
	num(w, "want", (*uint8)(&r.Want), 0, uint8(WantReady))
	num(w, "tokens", &r.Tokens, 0, math.MaxUint32)
	num(w, "hbm_tokens", &r.HBMTokens, 0, math.MaxUint32)
	num(w, "deadline_us", &r.DeadlineUS, 0, math.MaxUint32)
	w.bin("groups", &r.Groups, 0, MaxGroups)
	length := uint8(min(max(r.HashLen, 0), math.MaxUint8))
	num(w, "hash_len", &length, 0, MaxHashLen)
	r.HashLen = int(length)
	w.bin("hashes", &r.Hashes, 0, MaxHashes*MaxHashLen)
	r.checkHashes(w)
	w.bin("transfer", &r.Transfer, 0, MaxTransferName)
	w.str("peer", &r.Peer, 0, MaxPeerAddress)
	w.flag("early", &r.Early)
	if w.decoding && w.err == nil && len(w.buf) > 0 {
		w.fail("", "%d bytes after the last field", len(w.buf))
	}
}

// AppendRequest appends a request in the own form to f. After an error f is unchanged.
func AppendRequest(f *Frames, r *LookupRequest) error {
	w := wire{message: FormOwn.String(), buf: f.Buf}
	own := *r // several goroutines may append one request
	own.walkOwn(&w)
	if w.err != nil {
		return w.err
	}
	f.Buf = w.buf
	f.end()
	return nil
}

// The two foreign forms of raw hashes: upstream vLLM's, and the simple one.

const simpleHashBytes = 32

func parseUpstream(w *wire, f *Frames, r *LookupRequest) {
	tokens, length, hashes := f.At(1), f.At(2), f.At(3)
	if len(tokens) != 4 {
		w.fail("num_tokens", "%d bytes, allowed is 4", len(tokens))
		return
	}
	if len(length) != 2 {
		w.fail("hash_len", "%d bytes, allowed is 2", len(length))
		return
	}
	r.Tokens = uint64(binary.BigEndian.Uint32(tokens))
	r.HashLen = int(binary.BigEndian.Uint16(length))
	r.Hashes = hashes
	r.checkHashes(w)
}

func parseSimple(w *wire, f *Frames, r *LookupRequest) {
	r.Tokens = binary.LittleEndian.Uint64(f.At(0))
	for i := 1; i < f.Len(); i++ {
		if n := f.Ends[i] - f.begin(i); n != simpleHashBytes {
			w.fail("hashes", "hash %d has %d bytes, allowed is %d", i-1, n, simpleHashBytes)
			return
		}
	}
	if f.Len() > 1 {
		r.HashLen, r.Hashes = simpleHashBytes, f.Buf[f.Ends[0]:f.Bytes()]
	}
}

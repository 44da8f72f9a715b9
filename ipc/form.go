package ipc

import (
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

// Forms is the number of forms: Form values are below it.
const Forms = len(formNames)

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
	case n == 1 && size >= ownMinBytes && ownVersionOf(head[0]) > 0:
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
// *MalformedError, only r.Form and r.Version are valid: the form to answer in.
func (p *Parser) Parse(f *Frames, r *LookupRequest) error {
	*r = LookupRequest{}
	w := wire{decoding: true, message: "look-up"}
	if f.Len() == 0 {
		w.fail(ReasonFrames, "", "no frame, allowed is 1 to %d", MaxLookupFrames)
		return w.err
	}
	head := f.At(0)
	r.Form = detectForm(f.Len(), head, len(head))
	w.message = formMessages[r.Form]
	if f.Len() > MaxLookupFrames || f.Bytes() > MaxLookupBytes {
		r.Version = ownVersion(r.Form, head)
		w.fail(ReasonTooLarge, "", "%d frames, %d bytes, allowed is 1 to %d and %d", f.Len(), f.Bytes(),
			MaxLookupFrames, MaxLookupBytes)
		return w.err
	}
	switch r.Form {
	case FormOwn:
		r.Version = ownVersion(r.Form, head)
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
		w.fail(ReasonFrames, "", "%d frames, the first of %d bytes, fit no form", f.Len(), len(head))
	}
	if w.err != nil {
		return w.err
	}
	return nil
}

var formMessages = [...]string{FormMalformed: "look-up", FormOwn: "own look-up", FormUpstream: "upstream look-up",
	FormReset: "reset", FormAscend2: "2-frame look-up", FormAscend3: "3-frame look-up", FormAscend4: "4-frame look-up",
	FormSimple: "simple look-up"}

// AppendRequest appends r in its form to f. An own request with Version 0 gets the
// newest. After an error f is unchanged.
func AppendRequest(f *Frames, r *LookupRequest) error {
	w := wire{message: "look-up"}
	bytes, frames := len(f.Buf), len(f.Ends)
	if int(r.Form) < Forms {
		w.message = formMessages[r.Form]
	}
	switch r.Form {
	case FormOwn:
		appendOwn(&w, f, r)
	case FormUpstream:
		appendUpstream(&w, f, r)
	case FormReset:
		f.Add([]byte(upstreamReset))
	case FormSimple:
		appendSimple(&w, f, r)
	case FormAscend2, FormAscend3, FormAscend4:
		appendAscend(&w, f, r)
	default:
		w.fail(ReasonFrames, "", "form %d cannot be sent", r.Form)
	}
	if w.err != nil {
		f.Buf, f.Ends = f.Buf[:bytes], f.Ends[:frames]
		return w.err
	}
	return nil
}

func (r *LookupRequest) checkTokens(w *wire) {
	if r.Tokens > math.MaxUint32 {
		w.fail(ReasonRange, "tokens", "%d, allowed is 0 to %d", r.Tokens, uint32(math.MaxUint32))
	}
}

// checkHashes checks the length of the joined hashes; HashLen may be 0 only without hashes.
func (r *LookupRequest) checkHashes(w *wire) {
	if w.err != nil {
		return
	}
	n := r.HashLen
	if n < 0 || n > MaxHashLen || n == 0 && len(r.Hashes) > 0 {
		w.fail(ReasonRange, "hash_len", "%d, allowed is 1 to %d, or 0 without hashes", n, MaxHashLen)
		return
	}
	if n > 0 && len(r.Hashes)%n != 0 {
		w.fail(ReasonLengths, "hashes", "%d bytes, no multiple of hash_len %d", len(r.Hashes), n)
		return
	}
	if n > 0 && len(r.Hashes)/n > MaxHashes {
		w.fail(ReasonRange, "hashes", "%d hashes, allowed is 0 to %d", len(r.Hashes)/n, MaxHashes)
	}
}

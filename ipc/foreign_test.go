package ipc

import (
	"encoding/binary"
	"encoding/hex"
	"math"
	"time"
)

// What foreign clients send and read: the other end of the parsers.

// appendRequest appends r in its form to f. After an error f is unchanged.
func appendRequest(f *Frames, r *LookupRequest) error {
	w := wire{message: "look-up"}
	bytes, frames := len(f.Buf), len(f.Ends)
	switch r.Form {
	case FormOwn:
		return AppendRequest(f, r)
	case FormUpstream:
		appendUpstream(&w, f, r)
	case FormReset:
		f.Add([]byte(upstreamReset))
	case FormSimple:
		appendSimple(&w, f, r)
	case FormAscend2, FormAscend3, FormAscend4:
		appendAscend(&w, f, r)
	default:
		w.fail("", "form %d cannot be sent", r.Form)
	}
	if w.err != nil {
		f.Buf, f.Ends = f.Buf[:bytes], f.Ends[:frames]
		return w.err
	}
	return nil
}

func (r *LookupRequest) checkTokens(w *wire) {
	if r.Tokens > math.MaxUint32 {
		w.fail("tokens", "%d, allowed is 0 to %d", r.Tokens, uint32(math.MaxUint32))
	}
}

func appendUpstream(w *wire, f *Frames, r *LookupRequest) {
	if r.checkTokens(w); w.err != nil {
		return
	}
	if r.checkHashes(w); w.err != nil {
		return
	}
	f.Add([]byte(upstreamLookup))
	f.Buf = binary.BigEndian.AppendUint32(f.Buf, uint32(r.Tokens))
	f.end()
	f.Buf = binary.BigEndian.AppendUint16(f.Buf, uint16(r.HashLen))
	f.end()
	f.Add(r.Hashes)
}

func appendSimple(w *wire, f *Frames, r *LookupRequest) {
	n := len(r.Hashes) / simpleHashBytes
	if len(r.Hashes)%simpleHashBytes != 0 || n+1 > MaxLookupFrames {
		w.fail("hashes", "%d bytes, allowed is a multiple of %d, %d hashes", len(r.Hashes),
			simpleHashBytes, MaxLookupFrames-1)
		return
	}
	f.Buf = binary.LittleEndian.AppendUint64(f.Buf, r.Tokens)
	f.end()
	for i := range n {
		f.Add(r.Hashes[i*simpleHashBytes : (i+1)*simpleHashBytes])
	}
}

func appendAscend(w *wire, f *Frames, r *LookupRequest) {
	if r.checkTokens(w); w.err != nil {
		return
	}
	if r.checkHashes(w); w.err != nil {
		return
	}
	f.Buf = binary.BigEndian.AppendUint32(f.Buf, uint32(r.Tokens))
	f.end()
	if r.Form != FormAscend2 {
		appendGroups(w, f, r.Groups)
	}
	if r.Form == FormAscend4 {
		f.Buf = binary.BigEndian.AppendUint32(f.Buf, r.HBMTokens)
		f.end()
	}
	n := 0
	if r.HashLen > 0 {
		n = len(r.Hashes) / r.HashLen
	}
	f.Buf = appendArray(f.Buf, n)
	for i := range n {
		f.Buf = strHeader.append(f.Buf, 2*r.HashLen)
		f.Buf = hex.AppendEncode(f.Buf, r.Hashes[i*r.HashLen:(i+1)*r.HashLen])
	}
	f.end()
}

func appendGroups(w *wire, f *Frames, groups []uint8) {
	if len(groups) > MaxGroups {
		w.fail("groups", "%d elements, allowed is 0 to %d", len(groups), MaxGroups)
		return
	}
	if len(groups) == 0 {
		groups = []uint8{0}
	}
	f.Buf = appendArray(f.Buf, len(groups))
	for _, g := range groups {
		f.Buf = appendUint(f.Buf, uint64(g))
	}
	f.end()
}

// decodeReply reads the answer to a request of form f.
func decodeReply(f Form, frame []byte) (a LookupReply, err error) {
	w := wire{decoding: true, message: "look-up reply", buf: frame}
	switch f {
	case FormOwn:
		a.walkOwn(&w)
	case FormReset:
		if w.exactly(1); w.err == nil && frame[0] > 1 {
			w.fail("", "%d, allowed is 0 to 1", frame[0])
		} else if w.err == nil && frame[0] == 0 {
			a.Status = LookupOff
		}
	case FormSimple:
		if w.exactly(8); w.err == nil {
			a.Blocks = binary.LittleEndian.Uint64(frame)
		}
	default:
		if w.exactly(4); w.err == nil {
			a.Tokens = binary.BigEndian.Uint32(frame)
		}
	}
	if w.err != nil {
		return LookupReply{}, w.err
	}
	return a, nil
}

func (w *wire) exactly(n int) {
	if len(w.buf) != n {
		w.fail("", "%d bytes, allowed is %d", len(w.buf), n)
	}
}

// askForm asks in the form of r.
func (l *LookupClient) askForm(r *LookupRequest, timeout time.Duration) (LookupReply, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.frames.Reset()
	if err := appendRequest(&l.mu.frames, r); err != nil {
		return LookupReply{}, err
	}
	answer, err := l.exchangeLocked(&l.mu.frames, timeout)
	if err != nil {
		return LookupReply{}, err
	}
	a, err := decodeReply(r.Form, answer)
	return a, err
}

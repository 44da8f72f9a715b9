package ipc

import (
	"encoding/binary"
	"math"
)

const replyFields = 7

// AppendReply appends the one frame that answers a request of r's form. A foreign form has no
// status: everything except LookupHit is 0 hits there, and "not done" for a reset.
func AppendReply(dst []byte, r *LookupRequest, a LookupReply) []byte {
	hit := a.Status == LookupHit
	switch r.Form {
	case FormOwn:
		return appendOwnReply(dst, &a)
	case FormReset:
		if hit {
			return append(dst, 1)
		}
		return append(dst, 0)
	case FormSimple:
		if !hit {
			a.Blocks = 0
		}
		return binary.LittleEndian.AppendUint64(dst, a.Blocks)
	}
	if !hit {
		a.Tokens = 0
	}
	return binary.BigEndian.AppendUint32(dst, a.Tokens)
}

func appendOwnReply(dst []byte, a *LookupReply) []byte {
	dst = appendArray(dst, replyFields)
	dst = appendUint(dst, Version)
	dst = appendUint(dst, uint64(a.Status))
	dst = appendUint(dst, uint64(a.Tokens))
	dst = appendUint(dst, a.Lease)
	return appendUint(appendUint(appendBin(dst, a.Boot[:]), uint64(a.Disk)), uint64(a.Shared))
}

// DecodeReply reads the answer to a request in the own form.
func DecodeReply(frame []byte) (a LookupReply, err error) {
	w := wire{decoding: true, message: "look-up reply", buf: frame}
	if a.walkOwn(&w); w.err != nil {
		return LookupReply{}, w.err
	}
	return a, nil
}

// walkOwn reads the fields of an answer.
func (a *LookupReply) walkOwn(w *wire) {
	version := uint8(Version)
	w.array("", replyFields, replyFields, replyFields)
	num(w, "version", &version, Version, Version)
	status := uint8(a.Status)
	num(w, "status", &status, 0, math.MaxUint8)
	a.Status = LookupStatus(status)
	num(w, "tokens", &a.Tokens, 0, math.MaxUint32)
	num(w, "lease", &a.Lease, 0, math.MaxUint64)
	w.bin16("boot", &a.Boot)
	num(w, "disk", &a.Disk, 0, math.MaxUint32)
	num(w, "shared", &a.Shared, 0, math.MaxUint32)
	if w.err == nil && len(w.buf) > 0 {
		w.fail("", "%d bytes after the last field", len(w.buf))
	}
}

// Frames is a message of several frames, stored one after the other in Buf.
type Frames struct {
	Buf  []byte
	Ends []int32 // Ends[i] is where frame i ends
}

// Len returns the number of frames.
func (f *Frames) Len() int { return len(f.Ends) }

// At returns frame i.
func (f *Frames) At(i int) []byte {
	from := f.begin(i)
	return f.Buf[from:f.Ends[i]:f.Ends[i]]
}

func (f *Frames) begin(i int) int32 {
	if i == 0 {
		return 0
	}
	return f.Ends[i-1]
}

// Bytes returns the sum of the frames' lengths.
func (f *Frames) Bytes() int { return int(f.begin(len(f.Ends))) }

// Reset empties f and keeps its memory.
func (f *Frames) Reset() { f.Buf, f.Ends = f.Buf[:0], f.Ends[:0] }

// Add appends a frame.
func (f *Frames) Add(b []byte) {
	f.Buf = append(f.Buf, b...)
	f.end()
}

// end closes the frame whose bytes were appended to Buf.
func (f *Frames) end() { f.Ends = append(f.Ends, int32(len(f.Buf))) }

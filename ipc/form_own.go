package ipc

import (
	"encoding/binary"
	"math"
)

// ownFields are the fields of an own request, whose first byte says so.
const ownFields = 13

// ownVersionOf returns the version of an own request by its first byte, or 0 if it is none.
func ownVersionOf(first byte) uint8 {
	if first == mpArray|ownFields {
		return Version
	}
	return 0
}

// ownVersion returns the version of an own request by its first byte, even if the rest is
// malformed; 0 for another form.
func ownVersion(f Form, head []byte) uint8 {
	if f != FormOwn {
		return 0
	}
	return ownVersionOf(head[0])
}

// walkOwn walks the fields of docs/PROTOCOL.md section 2.1. r.Version is that of the first byte.
func (r *LookupRequest) walkOwn(w *wire) {
	w.array("", ownFields, ownFields, ownFields)
	num(w, "version", &r.Version, MinVersion, Version)
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
		w.fail(ReasonFields, "", "%d bytes after the last field", len(w.buf))
	}
}

func appendOwn(w *wire, f *Frames, r *LookupRequest) {
	own := *r
	if own.Version == 0 {
		own.Version = Version
	}
	w.buf = f.Buf
	own.walkOwn(w)
	if w.err == nil {
		f.Buf = w.buf
		f.end()
	}
}

// The two foreign forms of raw hashes: upstream vLLM's, and the simple one.

const simpleHashBytes = 32

func parseUpstream(w *wire, f *Frames, r *LookupRequest) {
	tokens, length, hashes := f.At(1), f.At(2), f.At(3)
	if len(tokens) != 4 {
		w.fail(ReasonLengths, "num_tokens", "%d bytes, allowed is 4", len(tokens))
		return
	}
	if len(length) != 2 {
		w.fail(ReasonLengths, "hash_len", "%d bytes, allowed is 2", len(length))
		return
	}
	r.Tokens = uint64(binary.BigEndian.Uint32(tokens))
	r.HashLen = int(binary.BigEndian.Uint16(length))
	r.Hashes = hashes
	r.checkHashes(w)
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

func parseSimple(w *wire, f *Frames, r *LookupRequest) {
	r.Tokens = binary.LittleEndian.Uint64(f.At(0))
	hashes := f.From(1)
	for i, end := range hashes.Ends {
		if n := int(end - hashes.begin(i)); n != simpleHashBytes {
			w.fail(ReasonLengths, "hashes", "hash %d has %d bytes, allowed is %d", i, n, simpleHashBytes)
			return
		}
	}
	if n := hashes.Bytes(); n > 0 {
		r.HashLen, r.Hashes = simpleHashBytes, f.Buf[hashes.Start:int(hashes.Start)+n]
	}
}

func appendSimple(w *wire, f *Frames, r *LookupRequest) {
	n := len(r.Hashes) / simpleHashBytes
	if len(r.Hashes)%simpleHashBytes != 0 || n+1 > MaxLookupFrames {
		w.fail(ReasonLengths, "hashes", "%d bytes, allowed is a multiple of %d, %d hashes", len(r.Hashes),
			simpleHashBytes, MaxLookupFrames-1)
		return
	}
	f.Buf = binary.LittleEndian.AppendUint64(f.Buf, r.Tokens)
	f.end()
	for i := range n {
		f.Add(r.Hashes[i*simpleHashBytes : (i+1)*simpleHashBytes])
	}
}

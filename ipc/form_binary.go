package ipc

import "encoding/binary"

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
		w.fail(ReasonLengths, "hashes", "%d bytes, allowed is a multiple of %d, %d hashes", len(r.Hashes), simpleHashBytes, MaxLookupFrames-1)
		return
	}
	f.Buf = binary.LittleEndian.AppendUint64(f.Buf, r.Tokens)
	f.end()
	for i := range n {
		f.Add(r.Hashes[i*simpleHashBytes : (i+1)*simpleHashBytes])
	}
}

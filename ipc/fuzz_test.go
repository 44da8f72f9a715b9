package ipc

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// Each decoder: nothing panics, an error is a *MalformedError, and an accepted message encodes to
// the same bytes, or, where other encoders may have written it, to the same meaning.

func readVectors[T any](f *testing.F, name string) (read T) {
	b, err := os.ReadFile(filepath.Join(wireDir, name))
	if err != nil {
		f.Fatal(err)
	}
	if err := json.Unmarshal(b, &read); err != nil {
		f.Fatal(err)
	}
	return read
}

func FuzzDecode(f *testing.F) {
	file := readVectors[sessionFile](f, "session.json")
	for _, v := range file.Messages {
		f.Add(unhexString(f, v.Hex))
	}
	for _, v := range file.Malformed {
		f.Add(unhexString(f, v.Hex))
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		msg, err := Decode(frame)
		if err != nil {
			reasonOf(t, err)
			return
		}
		again, err := Encode(nil, msg)
		if err != nil || !bytes.Equal(again, frame) {
			t.Fatalf("%x decodes to %+v, which encodes to %x, %v", frame, msg, again, err)
		}
	})
}

func FuzzDecodeReply(f *testing.F) {
	for _, v := range readVectors[lookupFile](f, "lookup.json").Replies {
		f.Add(uint8(formOf(f, v.Form)), unhexString(f, v.Hex))
	}
	f.Fuzz(func(t *testing.T, form uint8, frame []byte) {
		a, err := decodeReply(Form(form), frame)
		if err != nil {
			reasonOf(t, err)
			return
		}
		r := LookupRequest{Form: Form(form)}
		if again := AppendReply(nil, &r, a); !bytes.Equal(again, frame) {
			t.Fatalf("%x decodes to %+v, which encodes to %x", frame, a, again)
		}
	})
}

// fuzzForms seeds with the requests of some forms and runs what is accepted in them.
func fuzzForms(f *testing.F, accepted func(t *testing.T, frames *Frames, r *LookupRequest), forms ...Form) {
	file := readVectors[lookupFile](f, "lookup.json")
	add := func(form string, frames []string) {
		for _, want := range forms {
			if formOf(f, form) == want {
				f.Add(packFrames(framesOfHex(f, frames)))
			}
		}
	}
	for _, v := range append(file.Requests, file.Loose...) {
		add(v.Form, v.Frames)
	}
	for _, v := range file.Malformed {
		add(v.Form, v.Frames)
	}
	f.Fuzz(func(t *testing.T, packed []byte) {
		frames, ok := unpackFrames(packed)
		if !ok {
			return
		}
		var p Parser
		var r LookupRequest
		if err := p.Parse(frames, &r); err != nil {
			reasonOf(t, err)
			AppendReply(nil, &r, LookupReply{Status: LookupMalformed})
			return
		}
		accepted(t, frames, &r)
	})
}

// packFrames puts a 2-byte length before each frame, so that the fuzzer can move frames about.
func packFrames(f *Frames) (b []byte) {
	for i := range f.Len() {
		b = binary.BigEndian.AppendUint16(b, uint16(len(f.At(i))))
		b = append(b, f.At(i)...)
	}
	return b
}

func unpackFrames(b []byte) (*Frames, bool) {
	var f Frames
	for len(b) > 0 {
		if len(b) < 2 {
			return nil, false
		}
		n := int(binary.BigEndian.Uint16(b))
		if b = b[2:]; n > len(b) {
			return nil, false
		}
		f.Add(b[:n])
		b = b[n:]
	}
	return &f, true
}

func sameBytes(t *testing.T, frames *Frames, r *LookupRequest) {
	var again Frames
	if err := appendRequest(&again, r); err != nil || !sameFrames(&again, frames) {
		t.Fatalf("%x %v parses to %+v, which encodes to %x %v, %v", frames.Buf, frames.Ends, r, again.Buf, again.Ends,
			err)
	}
}

func sameMeaning(t *testing.T, frames *Frames, r *LookupRequest) {
	var again Frames
	if err := appendRequest(&again, r); err != nil {
		t.Fatalf("%+v: %v", r, err)
	}
	var p Parser
	var second LookupRequest
	if err := p.Parse(&again, &second); err != nil || !sameRequest(r, &second) {
		t.Fatalf("%+v encodes to %x, which parses to %+v, %v", r, again.Buf, second, err)
	}
}

func FuzzOwn(f *testing.F)      { fuzzForms(f, either, FormOwn) }
func FuzzUpstream(f *testing.F) { fuzzForms(f, either, FormUpstream, FormReset) }
func FuzzSimple(f *testing.F)   { fuzzForms(f, either, FormSimple) }
func FuzzAscend(f *testing.F)   { fuzzForms(f, either, FormAscend2, FormAscend3, FormAscend4) }

// either holds a request to what its form promises: the fuzzer may well arrive at another form.
func either(t *testing.T, frames *Frames, r *LookupRequest) {
	switch r.Form {
	case FormAscend2, FormAscend3, FormAscend4:
		sameMeaning(t, frames, r)
	default:
		sameBytes(t, frames, r)
	}
}

func TestPackFrames(t *testing.T) {
	f := framesOf([][]byte{{1, 2}, {}, {3}})
	got, ok := unpackFrames(packFrames(f))
	if !ok || !sameFrames(got, f) {
		t.Errorf("%+v, %v", got, ok)
	}
	if _, ok := unpackFrames([]byte{0, 9, 1}); ok {
		t.Error("a frame that is not there")
	}
}

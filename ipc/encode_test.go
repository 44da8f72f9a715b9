package ipc

import (
	"bytes"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"
)

// One message may be sent to many at once: encoding only reads it. The race detector is the judge.
func TestEncodeOnlyReads(t *testing.T) {
	for _, m := range sessionMessages() {
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { enc(m.msg) })
		}
		wg.Wait()
	}
	for _, n := range lookupRequests() {
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { encodeRequest(&n.r) })
		}
		wg.Wait()
	}
}

// TestDecodeMakesNothingOfPromises expects that a length which the frame cannot hold allocates no
// memory.
func TestDecodeMakesNothingOfPromises(t *testing.T) {
	frames := map[string][]byte{
		"segments": {0x94, 0x05, 0x01, 0x00, 0xdc, 0x20, 0x00, 0x95},
		"regions":  {0x93, 0x04, 0x01, 0xdc, 0x00, 0xfd, 0x95, 0x01},
		"leases":   {0x92, 0x08, 0xdc, 0x10, 0x00, 0x01},
		"sections": {0x97, 0x0a, 1, 1, 0, 0, 0, 0xdc, 0, 64, 0x95},
	}
	for name, frame := range frames {
		if n := bytesPerRun(func() {
			if _, err := Decode(frame); err == nil {
				t.Fatalf("%s: accepted", name)
			}
		}); n > 2048 {
			t.Errorf("%s: %d bytes are taken for a frame of %d", name, n, len(frame))
		}
	}
	loose := framesOf([][]byte{{0, 0, 0, 1}, append([]byte{0xdd, 0, 1, 0, 0, 0xd9, 64},
		bytes.Repeat([]byte("a"), 64)...)})
	if n := bytesPerRun(func() {
		var p Parser
		var r LookupRequest
		if p.Parse(loose, &r) == nil {
			t.Fatal("accepted")
		}
	}); n > 4096 {
		t.Errorf("%d bytes are taken for 65,536 hashes that are not there", n)
	}
}

// bytesPerRun is how much f allocates.
func bytesPerRun(f func()) uint64 {
	const runs = 100
	var before, after runtime.MemStats
	f()
	runtime.ReadMemStats(&before)
	for range runs {
		f()
	}
	runtime.ReadMemStats(&after)
	return (after.TotalAlloc - before.TotalAlloc) / runs
}

// Explanations for people are made to fit; everything else that is too long is refused.
func TestTextsFit(t *testing.T) {
	for _, text := range []string{strings.Repeat("ä", MaxText), "x" + strings.Repeat("ä", MaxText),
		strings.Repeat("€", MaxText), "bad \xff bytes", strings.Repeat("\xff", 2*MaxText)} {
		m, err := Decode(enc(&Error{Text: text}))
		if err != nil {
			t.Fatal(err)
		}
		got := m.(*Error).Text
		if !utf8.ValidString(got) || len(got) > MaxText || len(text) > MaxText && len(got) < MaxText-3 &&
			len(strings.ToValidUTF8(text, "?")) > MaxText {
			t.Errorf("%.20q of %d bytes becomes %.20q of %d", text, len(text), got, len(got))
		}
	}
	var e *MalformedError
	if _, err := Encode(nil, &Hello{MinVersion: 1, MaxVersion: 1,
		Software: strings.Repeat("x", MaxName+1)}); !errors.As(err, &e) || e.Field != "software" ||
		!strings.Contains(err.Error(), "allowed is 0 to 128") {
		t.Errorf("a long name: %v", err)
	}
	long := &Register{Instance: "x", World: 1, Shards: 1, Groups: []GroupDesc{{1, 1, 0}}, HashTokens: 1,
		Identity: []Pair{{"a", strings.Repeat("v", MaxIdentityBytes)}}}
	if _, err := Encode(nil, long); !errors.As(err, &e) || e.Field != "identity" {
		t.Errorf("a long identity: %v", err)
	}
}

// An encoder's error leaves the caller's buffer as it was.
func TestEncodeErrorKeepsBuffer(t *testing.T) {
	b := []byte("before")
	got, err := Encode(b, &Hello{})
	if err == nil || string(got) != "before" {
		t.Errorf("%q, %v", got, err)
	}
	f := framesOf([][]byte{{1}})
	for _, form := range []Form{FormMalformed, FormOwn, FormUpstream, FormAscend2, FormAscend4, FormSimple} {
		if err := appendRequest(f, &LookupRequest{Form: form, HashLen: 7, Hashes: make([]byte, 33)}); err == nil ||
			f.Len() != 1 || len(f.Buf) != 1 {
			t.Errorf("%v: %v, %d frames", form, err, f.Len())
		}
	}
}

// A job of more blocks than one may have is refused though each section is within its limits.
func TestJobBlocks(t *testing.T) {
	save := &Save{}
	for range 3 {
		save.Sections = append(save.Sections, Section{HashLen: 1, Hashes: make([]byte, MaxJobBlocks/2),
			Blocks: make([]byte, MaxJobBlocks*2)})
	}
	var e *MalformedError
	if _, err := Encode(nil, save); !errors.As(err, &e) || e.Field != "sections" {
		t.Errorf("12,288 blocks: %v", err)
	}
	save.Sections = save.Sections[:2]
	if _, err := Encode(nil, save); err != nil {
		t.Errorf("8,192 blocks: %v", err)
	}
}

package mooncake

import (
	"bytes"
	"encoding/hex"
	"testing"
	"time"
)

// The frames of both sides, as the helper's own tests have them.
func TestFrames(t *testing.T) {
	values := encodeValues(300, opGet, []place{{key: "k", area: areaArena, header: 32, offset: 1 << 20, length: 10}})
	if got, want := hex.EncodeToString(values), "0000001193cd012c029195a16b2001ce001000000a"; got != want {
		t.Errorf("values: %s, want %s", got, want)
	}
	if got, want := hex.EncodeToString(encodeKeys(1, opExists, []string{"a", "b"})), "0000000893010392a161a162"; got != want {
		t.Errorf("keys: %s, want %s", got, want)
	}
	w, err := decodeWelcome(unhex(t, "9301a0a3613a31"))
	if err != nil || w != (welcome{name: "a:1"}) {
		t.Errorf("welcome: %+v, %v", w, err)
	}
	r, err := decodeReply(unhex(t, "92cd012c920ad1fd40"))
	if err != nil || r.id != 300 || r.codes[0] != 10 || r.codes[1] != codeNotFound {
		t.Errorf("reply: %+v, %v", r, err)
	}
	for _, bad := range []string{"", "92", "920190", "92cd00019100", "9302a0a0", "9201910000", "92ff9100", "c1"} {
		if r, err := decodeReply(unhex(t, bad)); err == nil {
			t.Errorf("%q is a reply: %+v", bad, r)
		}
		if w, err := decodeWelcome(unhex(t, bad)); err == nil {
			t.Errorf("%q is a welcome: %+v", bad, w)
		}
	}
	o := Options{Master: "h:1", SoftPin: time.Second}
	if err := o.complete(); err != nil || len(encodeHello(&o, "h")) > maxFrame {
		t.Errorf("hello: %v", err)
	}
}

func unhex(t *testing.T, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// What parses is written to the same bytes, and nothing that a helper says is too much.
func FuzzReply(f *testing.F) {
	for _, r := range []reply{{1, []int64{0}}, {300, []int64{-704, 1 << 40}}, {1 << 62, make([]int64, maxKeys)}} {
		f.Add(r.encode())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := decodeReply(b); err == nil && (!bytes.Equal(r.encode(), b) || len(r.codes) > maxKeys) {
			t.Fatalf("%x is read as %+v", b, r)
		}
		_, _ = decodeWelcome(b)
	})
}

package mooncake

import (
	"bytes"
	"encoding/hex"
	"testing"
)

func unhex(t *testing.T, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// FuzzReply expects a reply that parses to be encoded to the same bytes, and no reply to use too
// much memory.
func FuzzReply(f *testing.F) {
	for _, r := range []reply{{1, []int64{0}}, {300, []int64{-704, 1 << 40}}, {1 << 62, make([]int64, maxKeys)}} {
		f.Add(encode(&r)[4:])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := decodeReply(b); err == nil && (!bytes.Equal(encode(&r)[4:], b) || len(r.Codes) > maxKeys) {
			t.Fatalf("%x is read as %+v", b, r)
		}
		_, _ = decode[welcome](b)
	})
}

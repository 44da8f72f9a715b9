package disk

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// FuzzHeader checks that a valid header is encoded to the same bytes again.
func FuzzHeader(f *testing.F) {
	p := make([]byte, headerBytes)
	h := header{key: keyOf(1), parent: pool.MakeHash([]byte{1}), length: 5, sum: 6, off: 64, born: 7}
	h.encode(p, 1)
	f.Add(bytes.Clone(p))
	f.Fuzz(func(t *testing.T, p []byte) {
		if len(p) < headerBytes {
			return
		}
		binary.LittleEndian.PutUint32(p, headerMagic) // so that most inputs get past the checksum
		clear(p[13:16])
		clear(p[112:headerBytes])
		binary.LittleEndian.PutUint32(p[4:], salted(1, p[8:headerBytes]))
		var h header
		if !h.decode(p, 1) {
			return
		}
		again := make([]byte, headerBytes)
		if h.encode(again, 1); !bytes.Equal(again, p[:headerBytes]) {
			t.Fatalf("%x\nis encoded again as\n%x", p[:headerBytes], again)
		}
	})
}

// FuzzTrailer checks that a valid trailer describes this file.
func FuzzTrailer(f *testing.F) {
	f.Add(uint32(3), int64(pageBytes), uint32(1), int64(2*pageBytes))
	f.Fuzz(func(t *testing.T, count uint32, headers int64, sum uint32, size int64) {
		p := make([]byte, trailerBytes)
		(&trailer{count: count, headers: headers, sum: sum}).encode(p, 1)
		var got trailer
		if got.decode(p, 1, size) &&
			(got.headers < 0 || got.headers+int64(got.count)*headerBytes > size || got.headers%pageBytes != 0) {
			t.Fatalf("%+v in a file of %d bytes", got, size)
		}
	})
}

package ipc

import (
	"bytes"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

// vmihailenco/msgpack in its compact mode writes the same bytes as msgpack.go, and reads what that
// writes.
func TestMsgpackOracle(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	numbers := []uint64{0, 1, 127, 128, 255, 256, 65535, 65536, math.MaxUint32, math.MaxUint32 + 1, math.MaxInt64,
		math.MaxUint64}
	for range 1000 {
		numbers = append(numbers, rng.Uint64()>>rng.IntN(64))
	}
	for _, v := range numbers {
		checkOracle(t, appendUint(nil, v), func(e *msgpack.Encoder) error { return e.EncodeUint(v) })
		got, n := readUint(appendUint(nil, v))
		if got != v || n != len(appendUint(nil, v)) {
			t.Errorf("%d is read as %d, %d bytes", v, got, n)
		}
	}
	for _, n := range []int{0, 1, 15, 16, 31, 32, 255, 256, 65535, 65536, 70000} {
		b := make([]byte, n)
		for i := range b {
			b[i] = 'a' + byte(i%26)
		}
		checkOracle(t, appendBin(nil, b), func(e *msgpack.Encoder) error { return e.EncodeBytes(b) })
		checkOracle(t, appendStr(nil, string(b)), func(e *msgpack.Encoder) error { return e.EncodeString(string(b)) })
		checkOracle(t, appendArray(nil, n), func(e *msgpack.Encoder) error { return e.EncodeArrayLen(n) })
		checkHeader(t, n, appendBin(nil, b), binHeader.strict, n)
		checkHeader(t, n, appendStr(nil, string(b)), strHeader.strict, n)
		checkHeader(t, n, appendArray(nil, n), arrayHeader.strict, 0)
	}
}

func checkOracle(t *testing.T, got []byte, encode func(*msgpack.Encoder) error) {
	t.Helper()
	var b bytes.Buffer
	e := msgpack.NewEncoder(&b)
	e.UseCompactInts(true)
	if err := encode(e); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, b.Bytes()) {
		t.Errorf("wrote %.20x, the oracle %.20x", got, b.Bytes())
	}
}

func checkHeader(t *testing.T, want int, b []byte, read func([]byte) (uint64, int), behind int) {
	t.Helper()
	v, n := read(b)
	if v != uint64(want) || n != len(b)-behind {
		t.Errorf("%.8x: read %d, %d bytes, want %d", b, v, n, want)
	}
	for cut := range n {
		if _, n := read(b[:cut]); n != cutShort {
			t.Errorf("%.8x cut to %d bytes: %d", b, cut, n)
		}
	}
}

// The oracle reads every vector's frame as an array of the same length, so that nothing in it is
// but msgpack.
func TestFramesAreMsgpack(t *testing.T) {
	for _, m := range sessionMessages() {
		var fields []any
		frame := enc(m.msg)
		if err := msgpack.Unmarshal(frame, &fields); err != nil || len(fields) != int(frame[0]&0x0f) {
			t.Errorf("%s: %d fields, %v", m.name, len(fields), err)
		}
	}
}

// Each reader takes the first bytes that the specification gives its type, and no other.
func TestReadersRefuse(t *testing.T) {
	tail := bytes.Repeat([]byte{0xff}, 16)
	for i := range 256 {
		c := byte(i)
		b := append([]byte{c}, tail...)
		for name, v := range map[string]struct {
			read func([]byte) (uint64, int)
			want bool
		}{
			"uint":  {readUint, c < 0x80 || c >= 0xcc && c <= 0xcf},
			"array": {arrayHeader.strict, c>>4 == 9 || c == 0xdc || c == 0xdd},
			"str":   {strHeader.strict, c>>5 == 5 || c >= 0xd9 && c <= 0xdb},
			"bin":   {binHeader.strict, c >= 0xc4 && c <= 0xc6},
		} {
			if _, n := v.read(b); (n > 0) != v.want {
				t.Errorf("0x%02x is taken for %s: %v, want %v", c, name, n > 0, v.want)
			}
		}
	}
}

func TestUnhex(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	const digits = "0123456789abcdef"
	for n := range 33 {
		src, want, got := make([]byte, 2*n), make([]byte, n), make([]byte, n)
		for i := range want {
			want[i] = byte(rng.Uint32())
			src[2*i], src[2*i+1] = digits[want[i]>>4], digits[want[i]&15]
		}
		if !unhex(got, src) || !bytes.Equal(got, want) {
			t.Errorf("%s: %x, want %x", src, got, want)
		}
		for i := range src { // every byte that is no digit, at every place
			old := src[i]
			for c := range 256 {
				src[i] = byte(c)
				if unhex(got, src) != bytes.ContainsRune([]byte(digits), rune(c)) {
					t.Fatalf("byte 0x%02x at %d of %d", c, i, len(src))
				}
			}
			src[i] = old
		}
	}
}

// strict reads a length in its shortest form.
func (h *header) strict(b []byte) (v uint64, n int) { return h.read(b, false) }

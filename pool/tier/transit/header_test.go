package transit

import (
	"bytes"
	"encoding/hex"
	"math/rand/v2"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// golden is a header as it lies in stores: what other versions of the agent on other nodes read.
const golden = "6b765431" + "e8030000" + "efbeadde" + "06000000" + "6e6f64652d3700000000000000000000" +
	"00000000000000000000000000000000" + "00f1536500000000" + "00000000"

func goldenKey() *pool.Key {
	return &pool.Key{Space: pool.Fingerprint{1, 2, 3}, Group: 1, Shard: 2,
		Hash: pool.MakeHash([]byte("0123456789abcdef0123456789abcdef"))}
}

// TestHeaderVector checks the bytes of a header, and that no other key accepts it.
func TestHeaderVector(t *testing.T) {
	h := Header{Length: 1000, Sum: 0xdeadbeef, Node: "node-7", When: 0x6553f100}
	value := bytes.Repeat([]byte{0xff}, HeaderBytes)
	h.Seal(goldenKey(), value)
	if got := hex.EncodeToString(value[:60]); got != golden {
		t.Errorf("header\n%s, want\n%s", got, golden)
	}
	back, err := unseal(goldenKey(), value, 1000)
	if err != nil || back != h {
		t.Errorf("%+v, %v; want %+v", back, err, h)
	}
	for name, change := range map[string]func(k *pool.Key){
		"space": func(k *pool.Key) { k.Space[15] = 1 }, "group": func(k *pool.Key) { k.Group = 2 },
		"shard": func(k *pool.Key) { k.Shard = 0 },
		"hash":  func(k *pool.Key) { k.Hash.Bytes[31] ^= 1 },
	} {
		k := goldenKey()
		change(k)
		if _, err := unseal(k, value, 1000); err == nil {
			t.Errorf("the header of a key with another %s was accepted", name)
		}
	}
	for bit := range 8 * HeaderBytes {
		value[bit/8] ^= 1 << (bit % 8)
		if _, err := unseal(goldenKey(), value, 1000); err == nil {
			t.Errorf("a header with bit %d turned was accepted", bit)
		}
		value[bit/8] ^= 1 << (bit % 8)
	}
	if _, err := unseal(goldenKey(), value, 999); err == nil {
		t.Error("a header of another length was accepted")
	}
}

// FuzzHeader checks that a header that is accepted is sealed to the same bytes again.
func FuzzHeader(f *testing.F) {
	value := make([]byte, HeaderBytes)
	(&Header{Length: 5, Node: "x"}).Seal(goldenKey(), value)
	f.Add(value)
	f.Fuzz(func(t *testing.T, p []byte) {
		if len(p) < HeaderBytes {
			return
		}
		h, err := unseal(goldenKey(), p, 5)
		if err != nil {
			return
		}
		again := make([]byte, HeaderBytes)
		h.Seal(goldenKey(), again)
		if !bytes.Equal(again, p[:HeaderBytes]) {
			t.Errorf("%x was accepted, and is sealed as %x", p[:HeaderBytes], again)
		}
	})
}

// TestStaging checks that loans never overlap, writers have half, and in the end nothing is lent.
func TestStaging(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	s, err := OpenStaging(256 << 10)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var lent []Loan
	written := int64(0)
	for range 5000 {
		if i := len(lent); i > 0 && r.IntN(2) == 0 {
			i = r.IntN(i)
			l := lent[i]
			lent = append(lent[:i], lent[i+1:]...)
			for _, b := range l.Bytes {
				if b != byte(l.off>>12) {
					t.Fatal("two loans overlap")
				}
			}
			if l.writing {
				written -= l.Size
			}
			s.Return(l)
			continue
		}
		l := s.Take(int64(1+r.IntN(20<<10)), r.IntN(2) == 0)
		if l.Size == 0 {
			continue
		}
		for i := range l.Bytes {
			l.Bytes[i] = byte(l.off >> 12)
		}
		if l.writing {
			written += l.Size
		}
		if written > 128<<10 {
			t.Fatalf("writers have %d bytes of 256 KiB", written)
		}
		lent = append(lent, l)
	}
	for _, l := range lent {
		s.Return(l)
	}
	if s.Lent() != 0 || len(s.mu.free) != 1 {
		t.Errorf("%d bytes are lent, %d extents are free", s.Lent(), len(s.mu.free))
	}
}

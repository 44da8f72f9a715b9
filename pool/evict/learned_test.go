package evict

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// experienced has learned from 5,000 look-ups.
func experienced() *Hazard {
	h := NewHazard()
	for i := range 5000 {
		h.Access(&pool.Use{Now: int64(i) * 1e9, BlockTokens: 512, Prints: []uint64{spread(i % 1000)}})
	}
	return h
}

func TestLearnedSurvives(t *testing.T) {
	h, g := experienced(), NewHazard()
	if err := g.Learn(h.Learned()); err != nil {
		t.Fatal(err)
	}
	h.tables.settleAll()
	for c := range numClasses {
		for i := range numBins {
			a, b := float64(g.tables.used[c][i]), float64(h.tables.used[c][i])/h.tables.weight
			if math.Abs(a-b) > 1e-3*math.Abs(b) {
				t.Fatalf("class %d, bin %d: %g uses, were %g", c, i, a, b)
			}
		}
	}
}

func TestDamagedLearnedIsRefused(t *testing.T) {
	b, g := experienced().Learned(), NewHazard()
	before := string(g.Learned())
	for i := 0; i < len(b); i += 1 + i/20 { // each byte of the head
		bad := append([]byte(nil), b...)
		bad[i] ^= 1 << (i % 8)
		if err := g.Learn(bad); !errors.Is(err, ErrLearned) {
			t.Fatalf("a bit changed in byte %d: %v", i, err)
		}
	}
	for n := range 200 {
		if err := g.Learn(b[:n]); !errors.Is(err, ErrLearned) {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
	if err := g.Learn(append(b, 0)); !errors.Is(err, ErrLearned) {
		t.Fatalf("one byte too many: %v", err)
	}
	if string(g.Learned()) != before {
		t.Fatal("what was refused has changed something")
	}
}

// sealed changes a word and makes the checksum right again.
func sealed(b []byte, word int, value uint32) []byte {
	b = append([]byte(nil), b...)
	binary.LittleEndian.PutUint32(b[4*word:], value)
	binary.LittleEndian.PutUint32(b[len(b)-4:], crc32.Checksum(b[:len(b)-4], castagnoli))
	return b
}

// TestForeignLearnedIsRefused changes what a checksum does not notice.
func TestForeignLearnedIsRefused(t *testing.T) {
	b, nan := experienced().Learned(), math.Float32bits(float32(math.NaN()))
	for _, c := range []struct {
		word  int
		value uint32
		want  error
	}{
		{0, 1, ErrLearned},
		{1, learnedVersion - 1, ErrLearned},
		{1, learnedVersion + 1, ErrLearned},
		{2, numClasses + 1, ErrLearned},
		{4, nan, ErrLearned},
		{4, math.Float32bits(float32(math.Inf(-1))), ErrLearned},
		{5, nan, ErrLearned},
		{9, math.Float32bits(float32(math.Inf(1))), ErrLearned},
		{10, nan, ErrLearned},
		{10, math.Float32bits(-1), ErrLearned},
		{10, 1 << 31, ErrLearned}, // a negative zero
	} {
		g := NewHazard()
		before := string(g.Learned())
		err := g.Learn(sealed(b, c.word, c.value))
		if !errors.Is(err, c.want) {
			t.Errorf("word %d is %#x: %v", c.word, c.value, err)
		}
		if string(g.Learned()) != before {
			t.Errorf("word %d is %#x: was refused and has changed something", c.word, c.value)
		}
	}
}

func FuzzLearn(f *testing.F) {
	f.Add(experienced().Learned())
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) == learnedBytes { // let it past the checksum
			b = sealed(b, 0, learnedMagic)
		}
		h := NewHazard()
		if h.Learn(b) != nil {
			return
		}
		if got := h.Learned(); string(got) != string(b) {
			t.Fatal("what was accepted comes out as other bytes")
		}
		for c := range h.worths {
			for i, w := range h.worths[c] {
				if !(w >= 0 && w < inf) {
					t.Fatalf("class %d, bin %d is worth %g", c, i, w)
				}
			}
		}
	})
}

package crc32c

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"regexp"
	"runtime"
	"strconv"
	"testing"
)

// TestCopyIsCopyAndCRC32C holds every form of Copy to copy and hash/crc32, at all alignments and
// odd lengths.
func TestCopyIsCopyAndCRC32C(t *testing.T) {
	for _, form := range forms() {
		t.Run(form.name, func(t *testing.T) {
			defer form.use()()
			random := rand.NewChaCha8([32]byte{1})
			src, dst := make([]byte, 70<<10), make([]byte, 70<<10)
			_, _ = random.Read(src)
			for i := range 3000 {
				r := rand.New(random)
				n, from, to := r.IntN(1+r.IntN(64<<10)), r.IntN(256), r.IntN(256)
				state := r.Uint32()
				clear(dst)
				sum := Copy(dst[to:to+n], src[from:from+n], state)
				if want := crc32.Update(state, table, src[from:from+n]); sum != want {
					t.Fatalf("%d: %d bytes from +%d to +%d: sum %08x, hash/crc32 says %08x", i, n, from, to, sum, want)
				}
				if !bytes.Equal(dst[to:to+n], src[from:from+n]) {
					t.Fatalf("%d: %d bytes from +%d to +%d: copied wrong", i, n, from, to)
				}
				if anySet(dst[:to]) || anySet(dst[to+n:]) {
					t.Fatalf("%d: %d bytes from +%d to +%d: wrote beside the destination", i, n, from, to)
				}
			}
		})
	}
}

// TestUpdateIsCRC32C holds every form of Update to hash/crc32, at all alignments and odd lengths.
func TestUpdateIsCRC32C(t *testing.T) {
	for _, form := range forms() {
		t.Run(form.name, func(t *testing.T) {
			defer form.use()()
			random := rand.NewChaCha8([32]byte{2})
			p := make([]byte, 70<<10)
			_, _ = random.Read(p)
			for i := range 3000 {
				r := rand.New(random)
				n, from, state := r.IntN(1+r.IntN(64<<10)), r.IntN(256), r.Uint32()
				sum, want := Update(state, p[from:from+n]), crc32.Update(state, table, p[from:from+n])
				if sum != want {
					t.Fatalf("%d: %d bytes at +%d: sum %08x, hash/crc32 says %08x", i, n, from, sum, want)
				}
			}
		})
	}
}

func anySet(p []byte) bool {
	for _, b := range p {
		if b != 0 {
			return true
		}
	}
	return false
}

// TestFoldConstants computes the numbers in crc32c_amd64.s from the polynomial.
func TestFoldConstants(t *testing.T) {
	text, err := os.ReadFile("crc32c_amd64.s")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`DATA fold(\d+)<>\+(\d)\(SB\)/8, \$0x([0-9a-f]+)`).FindAllStringSubmatch(string(text),
		-1)
	if len(found) != 10 {
		t.Fatalf("%d constants, want 10", len(found))
	}
	for _, f := range found {
		distance, _ := strconv.Atoi(f[1])
		exponent := 8*distance + 31
		if f[2] == "8" {
			exponent = 8*distance - 33
		}
		if want := fmt.Sprintf("%x", powerMod(exponent)); f[3] != want {
			t.Errorf("fold%s+%s is %s, want %s", f[1], f[2], f[3], want)
		}
	}
}

// powerMod returns x^n modulo CRC-32C's polynomial, reflected.
func powerMod(n int) uint32 {
	v := uint32(1) << 31
	for range n {
		low := v & 1
		v >>= 1
		if low == 1 {
			v ^= crc32.Castagnoli
		}
	}
	return v
}

func BenchmarkCopy(b *testing.B) {
	const segment, size = 32 << 10, 256 << 20
	src, dst := make([]byte, size), make([]byte, size)
	copy(dst, src)
	run := func(f func(d, s []byte)) func(*testing.B) {
		return func(b *testing.B) {
			r := rand.New(rand.NewPCG(1, 2))
			b.SetBytes(segment)
			for b.Loop() {
				i, j := r.IntN(size/segment)*segment, r.IntN(size/segment)*segment
				f(dst[i:i+segment], src[j:j+segment])
			}
		}
	}
	b.Run("copy", run(func(d, s []byte) { copy(d, s) }))
	for _, form := range forms() {
		b.Run(form.name, func(b *testing.B) {
			defer form.use()()
			run(func(d, s []byte) { Copy(d, s, 0) })(b)
		})
	}
	runtime.KeepAlive(dst)
}

// BenchmarkUpdate sums memory that no cache holds. The portable form is hash/crc32.
func BenchmarkUpdate(b *testing.B) {
	const segment, size = 256 << 10, 256 << 20
	mem := make([]byte, size)
	for i := range mem {
		mem[i] = byte(i)
	}
	run := func(f func(p []byte)) func(*testing.B) {
		return func(b *testing.B) {
			at := 0
			b.SetBytes(segment)
			for b.Loop() {
				f(mem[at : at+segment])
				at = (at + segment) % size
			}
		}
	}
	for _, form := range forms() {
		b.Run(form.name, func(b *testing.B) {
			defer form.use()()
			run(func(p []byte) { Update(0, p) })(b)
		})
	}
}

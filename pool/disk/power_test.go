package disk

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// TestPowerCut simulates closed segments after a crash of the machine: the footer is there, and
// some pages of blocks that it names did not reach the disk. They read as zeros or as older
// content. None is returned, the other blocks are; and the result is the same after another start,
// because nothing is recorded on the disk.
func TestPowerCut(t *testing.T) {
	r := rand.New(rand.NewPCG(newSeed(t), 0))
	const n = 25 // of one segment
	o := small(t)
	s := open(t, o)
	wantPut(t, s, 0, n, size)
	spans := map[int][2]int64{}
	for i := range n {
		p, _ := s.index.get(s.tagOf(new(keyOf(i))))
		spans[i] = [2]int64{p.off(), p.off() + headerBytes + size}
	}
	closeNow(t, s)
	elsewhere := small(t)
	other := open(t, elsewhere)
	for i := range n { // the same keys in the same places, under another nonce, and other bytes
		it := blockOf(i, size)
		it.Data = blockOf(i+n, size).Data
		put(t, other, it)
	}
	closeNow(t, other)
	lost := losePages(t, r, segmentFiles(t, o.Dirs[0].Path)[0], segmentFiles(t, elsewhere.Dirs[0].Path)[0])
	for process := range 2 {
		s = open(t, o)
		if s.count[recovered].Load() != n || s.count[scanned].Load() != 0 {
			t.Fatalf("process %d: %+v, want the footer to count", process, s.Report())
		}
		damaged := 0
		for i := range n {
			want := pool.OK
			for page := spans[i][0] / pageBytes; page*pageBytes < spans[i][1]; page++ {
				if lost[page] {
					want = pool.Corrupt
				}
			}
			if want == pool.Corrupt {
				damaged++
			}
			wantGet(t, s, i, size, want, "after a power cut")
		}
		if got := s.count[corrupt].Load(); got != uint64(damaged) || damaged == 0 || damaged == n {
			t.Fatalf("process %d: %d corrupt blocks are counted, %d were hit of %d", process, got, damaged, n)
		}
		closeNow(t, s)
	}
}

// losePages replaces some pages before a segment's footer by zeros or by another file's content.
func losePages(t *testing.T, r *rand.Rand, path, other string) map[int64]bool {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(other)
	if err != nil {
		t.Fatal(err)
	}
	lost := map[int64]bool{}
	for page := range (int64(len(b)) - footerBytes(25)) / pageBytes {
		if r.IntN(6) > 0 && page != 3 {
			continue
		}
		p := b[page*pageBytes:][:pageBytes]
		lost[page] = true
		if clear(p); r.IntN(2) == 0 {
			copy(p, before[page*pageBytes:])
		}
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return lost
}

// TestAddedDirectoryMovesOnlyItsShare checks that a key's directory depends on the names only.
func TestAddedDirectoryMovesOnlyItsShare(t *testing.T) {
	parent := t.TempDir()
	o := small(t)
	o.Dirs = []Dir{{filepath.Join(parent, "a"), 4 << 20}, {filepath.Join(parent, "b"), 4 << 20}}
	two := open(t, o)
	where := map[int]string{}
	for i := range 4000 {
		where[i] = two.choose(new(keyOf(i))).path
	}
	closeNow(t, two)
	o.Dirs = append([]Dir{{filepath.Join(parent, "c"), 4 << 20}}, o.Dirs...)
	three := open(t, o)
	share := map[string]int{}
	for i := range 4000 {
		now := three.choose(new(keyOf(i))).path
		if share[now]++; now != where[i] && now != o.Dirs[0].Path {
			t.Fatalf("block %d moved from %s to %s", i, where[i], now)
		}
	}
	for _, d := range o.Dirs {
		want := 4000 / len(o.Dirs)
		if n := share[d.Path]; n < want*9/10 || n > want*11/10 {
			t.Errorf("%s has %d of 4000 blocks, want about %d", d.Path, n, want)
		}
	}
}

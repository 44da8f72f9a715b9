package disk

import (
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

const size = 5000 // of a block, where a test does not say

func TestReopen(t *testing.T) {
	o := small(t)
	s := open(t, o)
	wantPut(t, s, 0, 200, size)
	closeNow(t, s)
	s = open(t, o)
	for i := range 200 {
		wantGet(t, s, i, size, pool.OK, "reopened")
	}
	if st := s.Report(); s.count[scanned].Load() != 0 || s.count[recovered].Load() != 200 {
		t.Fatalf("a store that was closed is recovered from footers, but: %+v", st)
	}
}

// TestDeleted blocks can be stored again.
func TestDeleted(t *testing.T) {
	s := open(t, small(t))
	wantPut(t, s, 0, 10, size)
	if err := s.Delete(t.Context(), []pool.Key{keyOf(3)}); err != nil {
		t.Fatal(err)
	}
	wantGet(t, s, 3, size, pool.Missing, "deleted")
	wantPut(t, s, 3, 4, size)
	wantGet(t, s, 3, size, pool.OK, "stored again")
}

func TestDeleteWhileItIsWritten(t *testing.T) {
	for range 20 {
		o := small(t)
		s := open(t, o)
		done := make(chan struct{})
		go func() {
			defer close(done)
			items := []pool.Item{blockOf(1, size)}
			_ = s.Put(t.Context(), items) // its status does not matter
		}()
		_ = s.Delete(t.Context(), []pool.Key{keyOf(1)})
		<-done
		if st := put(t, s, blockOf(1, size))[0]; st != pool.OK && st != pool.Exists {
			t.Fatalf("put after a delete during a put: status %d", st)
		}
	}
}

// TestDamage cuts the tail of the open segment and flips bytes anywhere, and opens the store.
func TestDamage(t *testing.T) {
	seed := newSeed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	rounds := 30
	if os.Getenv("KVAGENT_LONG") != "" {
		rounds = 1000
	}
	for range rounds {
		damageRound(t, r)
	}
}

func damageRound(t *testing.T, r *rand.Rand) {
	o := small(t)
	s := open(t, o)
	lengths := map[int]int{}
	where := map[int]string{} // of a block: its segment's file
	span := map[int][2]int64{}
	for i := range 40 + r.IntN(100) {
		lengths[i] = 1 + r.IntN(12000)
		wantPut(t, s, i, i+1, lengths[i])
		p, _ := s.index.get(s.tagOf(new(keyOf(i))))
		g := s.handles.hold(p.segment)
		where[i] = filepath.Base(g.path)
		_ = g.release()
		span[i] = [2]int64{p.off(), p.off() + headerBytes + int64(lengths[i])}
	}
	o.Dirs[0].Path = crash(t, o.Dirs[0].Path)
	hit := damage(t, r, o.Dirs[0].Path)
	s = open(t, o)
	for i, length := range lengths {
		got := get(t, s, i, length) // fails on a wrong byte
		if !hit(where[i], span[i]) && got != pool.OK {
			t.Fatalf("block %d in %s at %v was not damaged, and has status %d", i, where[i], span[i], got)
		}
	}
}

// damage says afterwards what it hit.
func damage(t *testing.T, r *rand.Rand, dir string) (hit func(file string, span [2]int64) bool) {
	files := segmentFiles(t, dir)
	cut, cutFile := int64(-1), ""
	flipped := map[string][]int64{}
	for range r.IntN(6) {
		f := files[r.IntN(len(files))]
		st, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		if st.Size() == 0 { // a segment that was about to be written
			continue
		}
		at := r.Int64N(st.Size())
		flip(t, f, at)
		flipped[filepath.Base(f)] = append(flipped[filepath.Base(f)], at)
	}
	if r.IntN(2) == 0 {
		for _, f := range files { // the last one that is written to
			if b, err := os.ReadFile(f); err != nil {
				t.Fatal(err)
			} else if strings.Trim(string(b), "\x00") != "" {
				cutFile, cut = f, r.Int64N(int64(len(b)))
			}
		}
		if err := os.Truncate(cutFile, cut); err != nil {
			t.Fatal(err)
		}
	}
	return func(file string, span [2]int64) bool {
		if file == filepath.Base(cutFile) && roundUp(span[1], pageBytes) > cut {
			return true
		}
		for _, at := range flipped[file] {
			if at >= span[0] && at < span[1] {
				return true
			}
		}
		return false
	}
}

func flip(t testing.TB, path string, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1 << (at % 8)
	if _, err := f.WriteAt(b, at); err != nil {
		t.Fatal(err)
	}
}

// TestFlippedByteIsSeenByARead damages a closed segment, which recovery does not read.
func TestFlippedByteIsSeenByARead(t *testing.T) {
	o := small(t)
	s := open(t, o)
	wantPut(t, s, 0, 2, size)
	p, _ := s.index.get(s.tagOf(new(keyOf(0))))
	closeNow(t, s)
	flip(t, segmentFiles(t, o.Dirs[0].Path)[0], p.off()+headerBytes+size/2)
	s = open(t, o)
	wantGet(t, s, 0, size, pool.Corrupt, "a byte was flipped")
	wantGet(t, s, 0, size, pool.Missing, "it was dropped")
	wantGet(t, s, 1, size, pool.OK, "its neighbour")
	if n := s.count[corrupt].Load(); n != 1 {
		t.Fatalf("%d corrupt blocks are counted, want 1", n)
	}
}

func TestBytesThatLookLikeARecordAreNone(t *testing.T) {
	o := small(t)
	s := open(t, o)
	// A tenant who knows the format and the place, but not the nonce, puts records of block 1
	// into its block. Its own header is then damaged, so recovery examines what follows it.
	wantPut(t, s, 1, 2, size)
	const place = 2 * pageBytes // after the piece of block 1
	evil := blockOf(0, size)
	h := header{key: keyOf(1), length: 1}
	for at := 0; at+headerBytes < size; at += 2 * headerBytes {
		h.off = place + headerBytes + int64(at)
		h.sum = pool.Sum(h.key.Seed(h.length), evil.Data[at+headerBytes:][:1])
		h.encode(evil.Data[at:], 0)
	}
	put(t, s, evil)
	if p, ok := s.index.get(s.tagOf(&evil.Key)); !ok || p.off() != place {
		t.Fatalf("the block is at %d, not where the forged headers say", p.off())
	}
	o.Dirs[0].Path = crash(t, o.Dirs[0].Path)
	flip(t, segmentFiles(t, o.Dirs[0].Path)[0], place+20)
	wantGet(t, open(t, o), 1, size, pool.OK, "a block that holds a forged record was recovered")
}

func TestLock(t *testing.T) {
	o := small(t)
	open(t, o)
	if _, err := Open(o); !errors.Is(err, ErrLocked) {
		t.Fatalf("a second store on the directory: %v", err)
	}
}

func TestLaterFormatIsRefused(t *testing.T) {
	o := small(t)
	name := filepath.Join(o.Dirs[0].Path, "v2-0000000000000001-0000000000000001.seg")
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if s, err := Open(o); !errors.Is(err, errFormat) {
		t.Fatalf("a segment of format 2: %v, %v", s, err)
	}
	if _, err := os.Stat(name); err != nil {
		t.Fatal("it was removed")
	}
}

func TestTmpfs(t *testing.T) {
	o := small(t)
	mount(t, "-t", "tmpfs", "-o", "size=64m", "tmpfs", o.Dirs[0].Path)
	s := open(t, o)
	wantPut(t, s, 0, 50, size)
	closeNow(t, s)
	wantGet(t, open(t, o), 49, size, pool.OK, "reopened")
}

// mount needs root, and says so if it is missing.
func mount(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.Command("mount", args...).CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: a mount needs root: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", "-l", args[len(args)-1]).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	})
}

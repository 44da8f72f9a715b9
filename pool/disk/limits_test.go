package disk

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
)

// takenBytes returns the disk use like du.
func takenBytes(t testing.TB, dir string) (n int64) {
	t.Helper()
	for _, f := range segmentFiles(t, dir) {
		var st unix.Stat_t
		if err := unix.Stat(f, &st); err == nil { // it may have been evicted
			n += st.Blocks * 512
		}
	}
	return n
}

func TestSpaceLimit(t *testing.T) {
	o := small(t)
	o.Dirs[0].Bytes, o.SegmentBytes = 8<<20, 256<<10
	s := open(t, o)
	var most int64
	for i := range 4000 { // 20 MB through 8 MiB
		wantPut(t, s, i, i+1, size)
		if i%50 == 0 {
			most = max(most, takenBytes(t, o.Dirs[0].Path))
		}
	}
	if limit := o.Dirs[0].Bytes; most > limit+limit/100 || most < limit*9/10 {
		t.Fatalf("at most %d bytes of disk were taken, want %d within 1 %%", most, limit)
	}
	wantGet(t, s, 3999, size, pool.OK, "the newest")
	wantGet(t, s, 0, size, pool.Missing, "the oldest")
	if u := s.Usage(); u.Bytes > u.Capacity {
		t.Fatalf("usage %+v", u)
	}
}

func TestIndexTakesAtMost64BytesABlock(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a million blocks")
	}
	var x index
	defer x.close()
	var worst float64
	const n = 1_000_000
	for i := range n {
		tg := tag{mix(uint64(i)), mix(uint64(i) + 1<<40)}
		if err := x.put(tg, place{segment: 1, at: uint32(i), length: 1}); err != nil {
			t.Fatal(err)
		}
		if i%10_000 == 9999 && i >= 100_000 {
			blocks, bytes := x.size()
			worst = max(worst, float64(bytes)/float64(blocks))
		}
	}
	blocks, bytes := x.size()
	t.Logf("%d blocks: %.1f bytes each, %.1f at worst from 100,000 on", blocks, float64(bytes)/n, worst)
	if blocks != n || worst > 64 {
		t.Fatalf("%d blocks, %.1f bytes each at worst", blocks, worst)
	}
	for i := 0; i < n; i += 3 {
		x.remove(tag{mix(uint64(i)), mix(uint64(i) + 1<<40)})
	}
	for i := range n {
		p, ok := x.get(tag{mix(uint64(i)), mix(uint64(i) + 1<<40)})
		if ok != (i%3 != 0) || (ok && p.at != uint32(i)) {
			t.Fatalf("block %d: %v %v", i, p, ok)
		}
	}
	if gone := x.removeSegments(map[uint32]bool{1: true}); gone != n-(n+2)/3 {
		t.Fatalf("%d blocks of the segment, want %d", gone, n-(n+2)/3)
	}
}

func TestOptions(t *testing.T) {
	for name, change := range map[string]func(o *Options){
		"Dirs":                 func(o *Options) { o.Dirs = nil },
		"Dirs[0].Path":         func(o *Options) { o.Dirs[0].Path = "here" },
		"Dirs[0].Bytes":        func(o *Options) { o.Dirs[0].Bytes = 1000 },
		"twice":                func(o *Options) { o.Dirs = append(o.Dirs, o.Dirs[0]) },
		"with segments of 262": func(o *Options) { o.Dirs[0].Bytes = 1 << 50 },
	} {
		o := small(t)
		change(&o)
		if s, err := Open(o); err == nil || !strings.Contains(err.Error(), strings.TrimSpace(name)) {
			t.Errorf("%s: %v", name, err)
			if s != nil {
				s.Close()
			}
		}
	}
	o := Options{Dirs: []Dir{{filepath.Join(t.TempDir(), "d"), 1 << 40}}}
	if o.setDefaults(); o.check() != nil || o.SegmentBytes != 256<<20 || o.WriteBytes != 8<<20 {
		t.Errorf("defaults for 1 TiB: %+v, %v", o, o.check())
	}
	o = Options{Dirs: []Dir{{filepath.Join(t.TempDir(), "d"), 2 << 20}}}
	if o.setDefaults(); o.check() != nil || o.SegmentBytes != 256<<10 {
		t.Errorf("defaults for 2 MiB: %+v, %v", o, o.check())
	}
}

func TestTooLarge(t *testing.T) {
	o := small(t)
	s := open(t, o)
	if st := put(t, s, blockOf(1, o.WriteBytes)); st[0] != pool.Invalid || s.count[tooLarge].Load() != 1 {
		t.Fatalf("a block larger than a write: status %d", st[0])
	}
	wantPut(t, s, 2, 3, o.WriteBytes-headerBytes)
	wantGet(t, s, 2, o.WriteBytes-headerBytes, pool.OK, "the largest block")
}

func TestManyAtOnce(t *testing.T) {
	s := open(t, small(t))
	var workers sync.WaitGroup
	for w := range 8 {
		workers.Go(func() {
			for k := range 20 {
				var items []pool.Item
				for i := range 20 {
					items = append(items, blockOf((w%4)*1000+k*20+i, 1+i*301))
				}
				if err := s.Put(t.Context(), items); err != nil {
					t.Error(err)
				}
				for i := range items {
					if st := items[i].Status; st != pool.OK && st != pool.Exists && st != pool.InProgress {
						t.Errorf("status %d", st)
					}
					items[i].Data = make([]byte, len(items[i].Data))
				}
				if err := s.Get(t.Context(), items); err != nil {
					t.Error(err)
				}
				for i := range items {
					n := (w%4)*1000 + k*20 + i
					if items[i].Status == pool.OK &&
						string(items[i].Data) != string(blockOf(n, len(items[i].Data)).Data) {
						t.Errorf("block %d: wrong bytes", n)
					}
				}
			}
		})
	}
	workers.Wait()
}

// TestSpaceLimitBesideForeignFiles checks that segments that cannot be opened, such as another
// user's, take their part of the room, and make way for what is written.
func TestSpaceLimitBesideForeignFiles(t *testing.T) {
	var fs broken
	o := small(t)
	o.faults = fs.meet
	s := open(t, o)
	wantPut(t, s, 0, 3000, size)
	closeNow(t, s)
	before := takenBytes(t, o.Dirs[0].Path)
	fs.set(failing(unix.EACCES, opOpen))
	s = open(t, o)
	fs.set(nil)
	wantGet(t, s, 2999, size, pool.Missing, "not opened")
	wantPut(t, s, 3000, 6000, size)
	if now := takenBytes(t, o.Dirs[0].Path); now > o.Dirs[0].Bytes || before < o.Dirs[0].Bytes/2 {
		t.Errorf("%d bytes, %d before, allowed are %d", now, before, o.Dirs[0].Bytes)
	}
	wantGet(t, s, 5999, size, pool.OK, "put")
}

func TestAfterClose(t *testing.T) {
	s := open(t, small(t))
	closeNow(t, s)
	if err := s.Put(t.Context(), nil); err == nil {
		t.Error("put after close: no error")
	}
	if err := s.Get(t.Context(), nil); err == nil {
		t.Error("get after close: no error")
	}
	_ = s.Report()
	if _, err := os.Stat(s.o.Dirs[0].Path); err != nil {
		t.Error(err)
	}
}

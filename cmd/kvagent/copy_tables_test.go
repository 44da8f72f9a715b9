package main

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool/pooltest"
)

func copyTableOf(gpu string, single uint64) *cudaipc.CopyTable {
	return &cudaipc.CopyTable{GPU: gpu, Rules: []cudaipc.CopyRule{
		{UpTo: single, Flat: cudaipc.CopyBatch, Rows: cudaipc.CopyRect},
		{UpTo: math.MaxUint64, Flat: cudaipc.CopySingle, Rows: cudaipc.CopySingle},
	}}
}

// A type of GPU has one table in the file; those of the others stay.
func TestCopyTablesFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "tables.json")
	for _, table := range []*cudaipc.CopyTable{copyTableOf("A", 1), copyTableOf("B", 2), copyTableOf("A", 3)} {
		if err := writeCopyTable(path, table); err != nil {
			t.Fatal(err)
		}
	}
	tables, err := readCopyTables(path)
	if err != nil || len(tables) != 2 || tables[0].GPU != "A" || tables[0].Rules[0].UpTo != 3 ||
		tables[1].Rules[0].UpTo != 2 {
		t.Errorf("%+v %v", tables, err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("%v are in the folder, want the file alone: %v", left, err)
	}
}

// A file that cannot be used costs a warning that names it, not the start, and is put aside for
// what is measured; one that is not there costs nothing.
func TestCopyTablesThatCannotBeUsed(t *testing.T) {
	for text, want := range map[string]string{
		"": "unexpected end", "{}": "cannot unmarshal", `[{"rules":[]}]`: "gpu is empty",
		`[{"gpu":"A","rules":[]}]`:                "0 rules, want 1 to 64",
		strings.Repeat("[", maxCopyTablesBytes+1): "bytes, allowed: at most",
	} {
		path := filepath.Join(t.TempDir(), "tables.json")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		core, logged := observer.New(zap.InfoLevel)
		tables := openCopyTables(path, zap.New(core))
		said := logged.FilterFieldKey("error").All()
		if len(tables.all()) != 0 || len(said) != 1 || !strings.Contains(said[0].ContextMap()["error"].(string),
			want) || !strings.Contains(said[0].ContextMap()["error"].(string), path) {
			t.Errorf("%.40q: %v, %v, want %q", text, tables.all(), said, want)
		}
		tables.add(copyTableOf("A", 1))
		if err := tables.keep(copyTableOf("A", 1)); err != nil || len(tables.all()) != 1 {
			t.Errorf("%.40q: %v, %v", text, err, tables.all())
		}
		if aside, err := os.ReadFile(path + ".broken"); err != nil || string(aside) != text {
			t.Errorf("%.40q: %v, %.40q is aside", text, err, aside)
		}
		if again, err := readCopyTables(path); err != nil || len(again) != 1 || again[0].GPU != "A" {
			t.Errorf("%.40q: read again: %v, %v", text, err, again)
		}
	}
	core, logged := observer.New(zap.InfoLevel)
	if tables := openCopyTables(filepath.Join(t.TempDir(), "none"), zap.New(core)); len(tables.all()) != 0 ||
		logged.Len() != 0 {
		t.Errorf("without a file: %v, %v", tables.all(), logged.All())
	}
}

// A table counts for the driver that it was measured on, and for the version that measured it; one
// written by hand for all.
func TestCopyTablesByDriverAndVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tables.json")
	for i, driver := range []int{12080, 13000, 12080} {
		table := copyTableOf("A", uint64(i+1))
		table.Driver, table.Version = driver, cudaipc.CopyTableVersion
		if err := writeCopyTable(path, table); err != nil {
			t.Fatal(err)
		}
	}
	tables, err := readCopyTables(path)
	if err != nil || len(tables) != 2 {
		t.Fatalf("%v, %v", tables, err)
	}
	for driver, want := range map[int]uint64{12080: 3, 13000: 2} {
		if found := cudaipc.FindCopyTable(tables, "A", driver); found == nil || found.Rules[0].UpTo != want {
			t.Errorf("driver %d: %v, want the table with %d", driver, found, want)
		}
	}
	if found := cudaipc.FindCopyTable(tables, "A", 12040); found != nil {
		t.Errorf("another driver has %v", found)
	}
	other := copyTableOf("A", 9)
	other.Driver, other.Version = 12040, cudaipc.CopyTableVersion+1
	if err := writeCopyTable(path, other); err != nil {
		t.Fatal(err)
	}
	if tables, err = readCopyTables(path); err != nil || len(tables) != 2 {
		t.Errorf("with one of another version: %v, %v", tables, err)
	}
}

// A path that is not a regular file, or cannot be read, is refused and not changed.
func TestCopyTablesOfAnotherKind(t *testing.T) {
	for name, put := range map[string]func(string) error{
		"folder": func(path string) error { return os.Mkdir(path, 0o700) },
		"FIFO":   func(path string) error { return unix.Mkfifo(path, 0o600) },
		"loop":   func(path string) error { return os.Symlink(path, path) },
	} {
		path := filepath.Join(t.TempDir(), "tables.json")
		if err := put(path); err != nil {
			t.Fatal(err)
		}
		before, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := readCopyTables(path); err == nil || name != "loop" &&
			!strings.Contains(err.Error(), "--copy-tables") {
			t.Errorf("%s: read: %v, want an error that names the flag", name, err)
		}
		if err := writeCopyTable(path, copyTableOf("A", 1)); err == nil {
			t.Errorf("%s: written over", name)
		}
		if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) {
			t.Errorf("%s: %v, was moved away", name, err)
		}
	}
}

// A disk that does not answer delays only the file's writer.
func TestCopyTablesOnAHungDisk(t *testing.T) {
	core, logged := observer.New(zap.InfoLevel)
	log := zap.New(core)
	tables := openCopyTables(filepath.Join(t.TempDir(), "tables.json"), log)
	tables.writing.Lock() // as a writer does whose disk hangs
	g, heard := newGPULog(tables, log), make(chan int)
	go func() {
		g.informed(cudaipc.CUDAInfo{Name: "A", Source: cudaipc.TableMeasured,
			Facts: cudaipc.GPUFacts{Table: copyTableOf("A", 1)}})
		heard <- len(tables.all())
	}()
	select {
	case n := <-heard:
		if n != 1 {
			t.Errorf("%d tables, want 1", n)
		}
	case <-time.After(pooltest.WaitLimit):
		t.Error("whoever tells of a GPU waits for the disk")
	}
	tables.writing.Unlock()
	pooltest.Until(t, "the GPU is logged", func() bool { return logged.Len() > 0 })
	if kept, err := readCopyTables(tables.path); err != nil || len(kept) != 1 {
		t.Errorf("%v, %v in the file, want the table", kept, err)
	}
}

// A disk that does not answer when the agent starts costs the start a moment and a log line. Tables
// read later come after those measured meanwhile.
func TestCopyTablesReadLate(t *testing.T) {
	core, logged := observer.New(zap.InfoLevel)
	answers, read := make(chan struct{}), make(chan struct{})
	c := &copyTables{path: "/hung/tables.json"}
	go func() {
		defer close(read)
		c.read(func(string) ([]cudaipc.CopyTable, error) {
			<-answers
			return []cudaipc.CopyTable{*copyTableOf("A", 1), *copyTableOf("B", 2)}, nil
		}, time.Millisecond, zap.New(core))
	}()
	select {
	case <-read:
	case <-time.After(pooltest.WaitLimit):
		t.Fatal("the start waits for the disk")
	}
	if said := logged.All(); len(said) != 1 || said[0].ContextMap()["file"] != c.path {
		t.Errorf("%v is said, want one line that names the file", said)
	}
	c.add(copyTableOf("A", 3))
	close(answers)
	pooltest.Until(t, "what was read late is used", func() bool { return len(c.all()) >= 3 })
	if all := c.all(); all[0].Rules[0].UpTo != 3 || all[2].GPU != "B" {
		t.Errorf("%+v, want what was measured first", all)
	}
}

// A measured table is used although it cannot be kept, and the log line of the measurement says so.
func TestCopyTablesReadOnly(t *testing.T) {
	core, logged := observer.New(zap.InfoLevel)
	log := zap.New(core)
	tables := openCopyTables("/proc/kvagent/tables.json", log)
	g := newGPULog(tables, log)
	info := cudaipc.CUDAInfo{Name: "A", Source: cudaipc.TableMeasured, Paths: "the table",
		Facts: cudaipc.GPUFacts{Table: copyTableOf("A", 1), Context: 5 << 20}}
	g.informed(info)
	g.informed(info)
	pooltest.Until(t, "the GPU is logged", func() bool { return logged.Len() > 0 })
	said := logged.All()
	if len(said) != 1 || len(tables.all()) != 1 {
		t.Fatalf("%v, tables %v", said, tables.all())
	}
	if is := said[0].ContextMap(); is["not_kept"] == nil || is["paths"] != "the table" ||
		is["own_memory"] != "5.0 MiB" || is["file"] != "/proc/kvagent/tables.json" {
		t.Errorf("%v", is)
	}
}

// How the pinning ends is said once, and loudly if it was refused.
func TestPinningIsTold(t *testing.T) {
	for name, test := range map[string]struct {
		said  []cudaipc.CUDAInfo
		lines []string
	}{
		"all": {[]cudaipc.CUDAInfo{{Pinned: 1}, {Pinned: 2, PinDone: true},
			{Pinned: 2, PinDone: true}}, []string{"info: the pool is pinned"}},
		"refused": {[]cudaipc.CUDAInfo{{Refused: 2, PinError: "no", PinDone: true},
			{Refused: 2, PinError: "no", PinDone: true}}, []string{"warn: the driver does not pin"}},
		"late, and then it came": {[]cudaipc.CUDAInfo{{}, {PinError: "10 s"}, {PinError: "12 s"}, {PinDone: true}},
			[]string{"warn: the driver does not pin", "info: the pool is pinned"}},
		"late, and then refused": {[]cudaipc.CUDAInfo{{}, {PinError: "10 s"}, {PinError: "no", PinDone: true}},
			[]string{"warn: the driver does not pin", "warn: the driver does not pin"}},
	} {
		core, logged := observer.New(zap.InfoLevel)
		g := newGPULog(nil, zap.New(core))
		for _, i := range test.said {
			g.informed(i)
		}
		said := logged.All()[1:] // the first is of the copy paths
		if len(said) != len(test.lines) {
			t.Errorf("%s: %v", name, said)
			continue
		}
		for i, want := range test.lines {
			if got := said[i].Level.String() + ": " + said[i].Message; !strings.HasPrefix(got, want) {
				t.Errorf("%s: %q, want %q", name, got, want)
			}
		}
	}
}

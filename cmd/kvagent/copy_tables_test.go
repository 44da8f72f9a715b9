package main

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvagent/kvagent/cudaipc"
)

func copyTableOf(gpu string, single uint64) *cudaipc.CopyTable {
	return &cudaipc.CopyTable{GPU: gpu, Rules: []cudaipc.CopyRule{
		{UpTo: single, Flat: cudaipc.CopyBatch, Rows: cudaipc.CopyRect}, {UpTo: math.MaxUint64, Flat: cudaipc.CopySingle, Rows: cudaipc.CopySingle},
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
	if err != nil || len(tables) != 2 || tables[0].GPU != "A" || tables[0].Rules[0].UpTo != 3 || tables[1].Rules[0].UpTo != 2 {
		t.Errorf("%+v %v", tables, err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("%v are in the folder, want the file alone: %v", left, err)
	}
}

// A file that cannot be used costs a warning that names it, not the start; one that is not there costs nothing.
func TestCopyTablesThatCannotBeUsed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tables.json")
	for text, want := range map[string]string{
		"": "unexpected end", "{}": "cannot unmarshal", `[{"rules":[]}]`: "gpu is empty", `[{"gpu":"A","rules":[]}]`: "0 rules, want 1 to 64",
		strings.Repeat("[", maxCopyTablesBytes+1): "bytes, allowed: at most",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		core, logged := observer.New(zap.InfoLevel)
		tables := loadCopyTables(path, zap.New(core))
		said := logged.FilterFieldKey("error").All()
		if tables != nil || len(said) != 1 || !strings.Contains(said[0].ContextMap()["error"].(string), want) || !strings.Contains(said[0].ContextMap()["error"].(string), path) {
			t.Errorf("%.40q: %v, %v, want %q", text, tables, said, want)
		}
		if err := writeCopyTable(path, copyTableOf("A", 1)); err == nil {
			t.Errorf("%.40q: written over", text)
		}
	}
	core, logged := observer.New(zap.InfoLevel)
	if tables := loadCopyTables(path+".none", zap.New(core)); tables != nil || logged.Len() != 0 {
		t.Errorf("without a file: %v, %v", tables, logged.All())
	}
}

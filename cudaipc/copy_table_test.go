package cudaipc

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
)

func TestCopyTableChoosesByLength(t *testing.T) {
	table := CopyTable{Rules: []CopyRule{
		{4096, CopyBatch, CopyRect}, {65536, CopyBatch, CopyBatch}, {math.MaxUint64, CopySingle, CopySingle},
	}}
	if err := table.Check(); err != nil {
		t.Fatal(err)
	}
	for n, want := range map[uint64][2]CopyPath{
		1: {CopyBatch, CopyRect}, 4096: {CopyBatch, CopyRect}, 4097: {CopyBatch, CopyBatch},
		65537: {CopySingle, CopySingle}, 1 << 40: {CopySingle, CopySingle},
	} {
		if flat, rows := table.Path(n, false), table.Path(n, true); flat != want[0] || rows != want[1] {
			t.Errorf("%d bytes: %s, in rows %s, want %v", n, flat, rows, want)
		}
	}
	text, err := json.Marshal(table)
	var again CopyTable
	if err == nil {
		err = json.Unmarshal(text, &again)
	}
	if err != nil || again.String() != table.String() {
		t.Errorf("a table is not the same after JSON: %s, %v", again.String(), err)
	}
}

func TestCopyTableRefuses(t *testing.T) {
	good := DefaultCopyTable()
	if err := good.Check(); err != nil {
		t.Fatal(err)
	}
	for want, table := range map[string]CopyTable{
		"0 rules":         {},
		"65 rules":        {Rules: make([]CopyRule, MaxCopyRules+1)},
		"rule 1: up_to":   {Rules: []CopyRule{{5, CopySingle, CopySingle}, {5, CopySingle, CopySingle}}},
		"flat \"rect\"":   {Rules: []CopyRule{{math.MaxUint64, CopyRect, CopyRect}}},
		"rows \"\"":       {Rules: []CopyRule{{math.MaxUint64, CopySingle, ""}}},
		"up to 100 bytes": {Rules: []CopyRule{{100, CopySingle, CopySingle}}},
	} {
		if err := table.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", table.Rules, err, want)
		}
	}
}

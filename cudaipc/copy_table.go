package cudaipc

import (
	"fmt"
	"math"
)

// CopyPath is a way to copy between a GPU and pinned memory.
type CopyPath string

// The paths.
const (
	CopySingle CopyPath = "single" // one call per run
	CopyBatch  CopyPath = "batch"  // one call for many runs (CUDA 12.8); single without it
	CopyRect   CopyPath = "rect"   // one call for rows at constant distances
	// CopyKernel is one launch of the copy kernel (CUDA 11) for many runs. It takes a few of the
	// engine's thread blocks; where it does not load, CopyBatch is used.
	CopyKernel CopyPath = "kernel"
)

// CopyTable tells which path runs take by their length. Calibrate measures it for a type of GPU.
type CopyTable struct {
	GPU string `json:"gpu"` // the name of the type; empty: the default of all
	// Driver is the CUDA version of the driver that the table was measured on, as in CUDAInfo; 0:
	// any.
	Driver  int        `json:"driver,omitempty"`
	Version int        `json:"version,omitempty"` // CopyTableVersion that measured it; 0: written by hand
	Rules   []CopyRule `json:"rules"`
}

// CopyTableVersion is the version of what Calibrate measures and of the copy kernel. A table of
// another version is measured again. Since version 2 a table may name the kernel.
const CopyTableVersion = 2

// CopyRule applies to runs of up to UpTo bytes that are longer than those of the rule before it.
type CopyRule struct {
	UpTo uint64   `json:"up_to"` // bytes
	Flat CopyPath `json:"flat"`  // runs that lie anywhere: single, batch or kernel
	Rows CopyPath `json:"rows"`  // runs at constant distances: these, or rect
}

// MaxCopyRules is the most rules that a table may have.
const MaxCopyRules = 64

// DefaultCopyTable returns the table for a GPU that was not measured: few calls, no kernel.
func DefaultCopyTable() CopyTable {
	return CopyTable{Rules: []CopyRule{
		{UpTo: math.MaxUint64, Flat: CopyBatch, Rows: CopyRect},
	}}
}

// Check returns an error that names what is wrong with a table.
func (t *CopyTable) Check() error {
	if len(t.Rules) == 0 || len(t.Rules) > MaxCopyRules {
		return fmt.Errorf("copy table: %d rules, want 1 to %d", len(t.Rules), MaxCopyRules)
	}
	for i, r := range t.Rules {
		if i > 0 && r.UpTo <= t.Rules[i-1].UpTo {
			return fmt.Errorf("copy table: rule %d: up_to %d is not more than the %d before it", i, r.UpTo,
				t.Rules[i-1].UpTo)
		}
		if !flat(r.Flat) {
			return fmt.Errorf("copy table: rule %d: flat %q, want single, batch or kernel", i, r.Flat)
		}
		if r.Rows != CopyRect && !flat(r.Rows) {
			return fmt.Errorf("copy table: rule %d: rows %q, want rect, single, batch or kernel", i, r.Rows)
		}
	}
	if last := t.Rules[len(t.Rules)-1].UpTo; last < math.MaxUint32 {
		return fmt.Errorf("copy table: the last rule is up to %d bytes, want %d or more: runs are as long as that",
			last, math.MaxUint32)
	}
	return nil
}

// FindCopyTable returns the table of a type of GPU under a driver, or nil.
func FindCopyTable(tables []CopyTable, gpu string, driver int) *CopyTable {
	for i := range tables {
		if t := &tables[i]; t.GPU == gpu && (t.Driver == 0 || t.Driver == driver) &&
			(t.Version == 0 || t.Version == CopyTableVersion) {
			return t
		}
	}
	return nil
}

// flat reports whether a path is one for runs that lie anywhere.
func flat(p CopyPath) bool { return p == CopySingle || p == CopyBatch || p == CopyKernel }

// Path returns the path of runs of n bytes, at constant distances or not.
func (t *CopyTable) Path(n uint64, rows bool) CopyPath {
	r := &t.Rules[len(t.Rules)-1]
	for i := range t.Rules {
		if n <= t.Rules[i].UpTo {
			r = &t.Rules[i]
			break
		}
	}
	if rows {
		return r.Rows
	}
	return r.Flat
}

// String returns the table in one line.
func (t *CopyTable) String() string {
	text, from := t.GPU, uint64(0)
	if text == "" {
		text = "not measured"
	}
	for _, r := range t.Rules {
		text += fmt.Sprintf("; above %d bytes %s, in rows %s", from, r.Flat, r.Rows)
		from = r.UpTo
	}
	return text
}

// Names reports whether any rule names the path.
func (t *CopyTable) Names(p CopyPath) bool {
	for i := range t.Rules {
		if t.Rules[i].Flat == p || t.Rules[i].Rows == p {
			return true
		}
	}
	return false
}

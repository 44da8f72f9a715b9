package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
)

// One JSON file holds the copy tables, one for each type of GPU and driver.
const (
	defaultCopyTables  = "/var/cache/kvagent/copy-tables.json"
	maxCopyTables      = 64      // types of GPUs
	maxCopyTablesBytes = 1 << 20 // of the file
)

// readCopyTables reads and checks the file. A missing file has no tables. Tables of other versions
// are skipped.
func readCopyTables(path string) ([]cudaipc.CopyTable, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() { // reading a FIFO would never end
		return nil, fmt.Errorf("--copy-tables: %s: %v, allowed: a regular file, or none", path, info.Mode().Type())
	}
	if info.Size() > maxCopyTablesBytes {
		return nil, &brokenTables{fmt.Errorf("%s: %d bytes, allowed: at most %d", path, info.Size(),
			maxCopyTablesBytes)}
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	tables, err := parseCopyTables(text)
	if err != nil {
		return nil, &brokenTables{fmt.Errorf("%s: %w", path, err)}
	}
	return tables, nil
}

// brokenTables is the error of a regular file that holds no copy tables.
type brokenTables struct{ error }

func (b *brokenTables) Unwrap() error { return b.error }

func parseCopyTables(text []byte) ([]cudaipc.CopyTable, error) {
	var tables []cudaipc.CopyTable
	if err := json.Unmarshal(text, &tables); err != nil {
		return nil, err
	}
	if len(tables) > maxCopyTables {
		return nil, fmt.Errorf("%d tables, allowed: at most %d", len(tables), maxCopyTables)
	}
	tables = slices.DeleteFunc(tables,
		func(t cudaipc.CopyTable) bool { return t.Version != 0 && t.Version != cudaipc.CopyTableVersion })
	for i := range tables {
		if tables[i].GPU == "" {
			return nil, fmt.Errorf("table %d: gpu is empty, allowed: the name of a type of GPU", i)
		}
		if err := tables[i].Check(); err != nil {
			return nil, fmt.Errorf("%s: %w", tables[i].GPU, err)
		}
	}
	return tables, nil
}

// writeCopyTable writes a table to the file, replacing the one of that type of GPU and driver.
// Another process sees the old file or the new one. A file with other contents is renamed; a file
// that cannot be read stays.
func writeCopyTable(path string, t *cudaipc.CopyTable) error {
	tables, err := readCopyTables(path)
	if errors.As(err, new(*brokenTables)) {
		err = os.Rename(path, path+".broken")
	}
	if err != nil {
		return err
	}
	kept := []cudaipc.CopyTable{*t}
	for i := range tables {
		if (tables[i].GPU != t.GPU || tables[i].Driver != t.Driver) && len(kept) < maxCopyTables {
			kept = append(kept, tables[i])
		}
	}
	text, err := json.MarshalIndent(kept, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".copy-tables-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // it exists only after a failure
	_, err = f.Write(append(text, '\n'))
	if err = errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// copyTables holds the tables of one agent: those of its file, and those that its movers measure.
type copyTables struct {
	path    string
	writing sync.Mutex // guards the file; mu is never held during disk access
	mu      struct {
		sync.Mutex
		tables []cudaipc.CopyTable
	}
}

// openCopyTables reads the file. If it cannot be used, or its disk hangs, that is logged and the
// tables are measured again.
func openCopyTables(path string, log *zap.Logger) *copyTables {
	c := &copyTables{path: path}
	c.read(readCopyTables, copyTablesWithin, log)
	return c
}

// copyTablesWithin bounds the wait of the agent's start for the file, because a read of a hanging
// disk cannot be cancelled.
const copyTablesWithin = 2 * time.Second

// read adds the file's tables after those measured meanwhile. Tables that are not read in time are
// added when they are.
func (c *copyTables) read(file func(path string) ([]cudaipc.CopyTable, error), within time.Duration, log *zap.Logger) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		tables, err := file(c.path)
		if err != nil {
			log.Warn("the measured copy paths cannot be used: they are measured again", zap.Error(err))
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.mu.tables = append(c.mu.tables, tables...)
	}()
	late := time.NewTimer(within)
	defer late.Stop()
	select {
	case <-done:
	case <-late.C:
		log.Warn("the file of the measured copy paths cannot be read now: they are measured again",
			zap.String("file", c.path), zap.Duration("waited", within))
	}
}

func (c *copyTables) all() []cudaipc.CopyTable {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.mu.tables)
}

// add keeps a measured table for later movers.
func (c *copyTables) add(t *cudaipc.CopyTable) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.tables = append([]cudaipc.CopyTable{*t}, c.mu.tables...)
}

// keep writes a measured table to the file, for later agents. The disk may take any time, or never
// answer.
func (c *copyTables) keep(t *cudaipc.CopyTable) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	return writeCopyTable(c.path, t)
}

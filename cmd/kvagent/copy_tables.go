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

// Copy tables lie in one JSON file, for each type of GPU and driver one.
const (
	defaultCopyTables  = "/var/cache/kvagent/copy-tables.json"
	maxCopyTables      = 64      // types of GPUs
	maxCopyTablesBytes = 1 << 20 // of the file
)

// readCopyTables reads and checks the file; one that is not there is none. Tables of other versions are left out.
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
		return nil, &brokenTables{fmt.Errorf("%s: %d bytes, allowed: at most %d", path, info.Size(), maxCopyTablesBytes)}
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

// brokenTables is what is wrong with a regular file that holds no copy tables.
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
	tables = slices.DeleteFunc(tables, func(t cudaipc.CopyTable) bool { return t.Version != 0 && t.Version != cudaipc.CopyTableVersion })
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

// writeCopyTable puts a table into the file, in the place of the one of that type of GPU under that driver. Another process sees the
// old file or the new one. A file that holds something else is put aside; what cannot be read stays where it is.
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
	defer os.Remove(f.Name()) // gone, unless something failed
	_, err = f.Write(append(text, '\n'))
	if err = errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// copyTables are the tables of one agent: those of its file, and those that its movers measure.
type copyTables struct {
	path    string
	writing sync.Mutex // of the file; whoever has mu does not wait for a disk
	mu      struct {
		sync.Mutex
		tables []cudaipc.CopyTable
	}
}

// openCopyTables reads the file. One that cannot be used costs a line, and is measured again; so does one on a disk that hangs.
func openCopyTables(path string, log *zap.Logger) *copyTables {
	c := &copyTables{path: path}
	c.read(readCopyTables, copyTablesWithin, log)
	return c
}

// copyTablesWithin is how long the agent's start waits for the file: nobody can end a read of a disk that hangs.
const copyTablesWithin = 2 * time.Second

// read takes in what the file has, behind what was measured meanwhile; what is not read in time counts from when it is.
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
		log.Warn("the file of the measured copy paths cannot be read now: they are measured again", zap.String("file", c.path), zap.Duration("waited", within))
	}
}

func (c *copyTables) all() []cudaipc.CopyTable {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.mu.tables)
}

// add keeps what was measured for movers to come.
func (c *copyTables) add(t *cudaipc.CopyTable) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.tables = append([]cudaipc.CopyTable{*t}, c.mu.tables...)
}

// keep puts what was measured into the file, for agents to come. The disk may take any time, or not answer at all.
func (c *copyTables) keep(t *cudaipc.CopyTable) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	return writeCopyTable(c.path, t)
}

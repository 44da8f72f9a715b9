package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
)

// Copy tables lie in one JSON file, for each type of GPU one.
const (
	defaultCopyTables  = "/var/cache/kvagent/copy-tables.json"
	maxCopyTables      = 64      // types of GPUs
	maxCopyTablesBytes = 1 << 20 // of the file
)

// readCopyTables reads and checks the file; one that is not there is none.
func readCopyTables(path string) ([]cudaipc.CopyTable, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if info.Size() > maxCopyTablesBytes {
		return nil, fmt.Errorf("%s: %d bytes, allowed: at most %d", path, info.Size(), maxCopyTablesBytes)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var tables []cudaipc.CopyTable
	if err := json.Unmarshal(text, &tables); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(tables) > maxCopyTables {
		return nil, fmt.Errorf("%s: %d tables, allowed: at most %d", path, len(tables), maxCopyTables)
	}
	for i := range tables {
		if tables[i].GPU == "" {
			return nil, fmt.Errorf("%s: table %d: gpu is empty, allowed: the name of a type of GPU", path, i)
		}
		if err := tables[i].Check(); err != nil {
			return nil, fmt.Errorf("%s: %s: %w", path, tables[i].GPU, err)
		}
	}
	return tables, nil
}

// writeCopyTable puts a table into the file, in the place of the one of that type of GPU. Another process sees the old file or
// the new one.
func writeCopyTable(path string, t *cudaipc.CopyTable) error {
	tables, err := readCopyTables(path)
	if err != nil {
		return fmt.Errorf("%w: remove it", err)
	}
	kept := []cudaipc.CopyTable{*t}
	for i := range tables {
		if tables[i].GPU != t.GPU {
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

// loadCopyTables is what serve has of the file; a file that cannot be used costs speed, not the start.
func loadCopyTables(path string, log *zap.Logger) []cudaipc.CopyTable {
	tables, err := readCopyTables(path)
	if err != nil {
		log.Warn("the measured copy paths are not used; remove the file and run kvagent calibrate", zap.Error(err))
		return nil
	}
	if len(tables) > 0 {
		var texts []string
		for i := range tables {
			texts = append(texts, tables[i].String())
		}
		log.Info("copy paths", zap.String("file", path), zap.String("measured", strings.Join(texts, " | ")))
	}
	return tables
}

package kvagent_test

import (
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// Limits of folders, which are read like a table of contents, and of lines, which must not need
// scrolling.
const (
	maxFiles = 40    // source files of a folder, Go and Python; tests are not counted
	maxLines = 4_500 // lines of them

	maxCodeColumns = 120
	maxTextColumns = 100 // comments and Markdown
	tabColumns     = 4
)

// largeFolders may exceed these limits. Each exception has its reason; one that is not needed is an
// error.
var largeFolders = map[string]string{}

// notOurs are folders of foreign code, generated files, and data.
var notOurs = []string{
	".git", "bin", "build", "dist", "third_party", "testdata/wire", "testdata/mutants", "python/build", "python/dist",
	"python/locks",
}

func TestFoldersAreRooms(t *testing.T) {
	type room struct{ files, lines int }
	rooms := map[string]room{}
	eachFile(t, func(name, text string) {
		if !isSource(name) {
			return
		}
		r := rooms[path.Dir(name)]
		rooms[path.Dir(name)] = room{r.files + 1, r.lines + strings.Count(text, "\n")}
	})
	for folder, r := range rooms {
		large := r.files > maxFiles || r.lines > maxLines
		reason, excepted := largeFolders[folder]
		t.Logf("%-28s %3d files %6d lines", folder, r.files, r.lines)
		switch {
		case large && !excepted:
			t.Errorf("%s has %d source files and %d lines; at most %d and %d are allowed: make two of it, with an "+
				"arrow between them in graph_test.go", folder, r.files, r.lines, maxFiles, maxLines)
		case !large && excepted:
			t.Errorf("%s is no longer too large (%d files, %d lines): delete its exception (%s)", folder, r.files,
				r.lines, reason)
		}
	}
	for folder := range largeFolders {
		if _, there := rooms[folder]; !there {
			t.Errorf("%s has no source files: delete its exception", folder)
		}
	}
}

func TestLinesEnd(t *testing.T) {
	wide, first := map[string]int{}, map[string][]string{}
	eachFile(t, func(name, text string) {
		folder := path.Dir(name)
		for n, line := range strings.Split(text, "\n") {
			if columns(line) <= limitOf(name, line) {
				continue
			}
			wide[folder]++
			if len(first[folder]) < 5 {
				first[folder] = append(first[folder], fmt.Sprintf("%s:%d", path.Base(name), n+1))
			}
		}
	})
	for folder, count := range wide {
		t.Errorf("%s: %d lines are wider than %d columns (comments and Markdown %d): %s",
			folder, count, maxCodeColumns, maxTextColumns, strings.Join(first[folder], ", "))
	}
}

func isSource(name string) bool {
	switch path.Ext(name) {
	case ".go":
		return !strings.HasSuffix(name, "_test.go")
	case ".py":
		return !strings.HasPrefix(name, "python/tests/")
	}
	return false
}

// isText reports whether a file has a limit of columns: code, scripts and Markdown.
func isText(name string) bool {
	switch path.Ext(name) {
	case ".go", ".py", ".c", ".h", ".md":
		return true
	case "":
		return name == "Makefile" || strings.HasPrefix(name, "scripts/") || strings.HasPrefix(name, ".ci/")
	}
	return false
}

// limitOf returns the columns that a line may have. A row of a Markdown table cannot be broken.
func limitOf(name, line string) int {
	trimmed := strings.TrimSpace(line)
	if path.Ext(name) == ".md" {
		if strings.HasPrefix(trimmed, "|") {
			return math.MaxInt
		}
		return maxTextColumns
	}
	if strings.HasPrefix(trimmed, "//") || strings.HasPrefix(trimmed, "#") {
		return maxTextColumns
	}
	return maxCodeColumns
}

func columns(line string) int {
	return utf8.RuneCountInString(line) + (tabColumns-1)*strings.Count(line, "\t")
}

// eachFile calls f with the name and the text of each text file of the project.
func eachFile(t *testing.T, f func(name, text string)) {
	t.Helper()
	count := 0
	err := filepath.WalkDir(".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name = filepath.ToSlash(name)
		if entry.IsDir() {
			if slices.Contains(notOurs, name) || strings.HasSuffix(name, "_cache") || path.Base(name) == "__pycache__" {
				return fs.SkipDir
			}
			return nil
		}
		if !entry.Type().IsRegular() || !isText(name) {
			return nil
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		count++
		f(name, string(text))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if count < 100 {
		t.Fatalf("%d files: this test looks at the wrong folder", count)
	}
}

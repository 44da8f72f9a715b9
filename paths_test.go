package kvagent

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// stop is a function on a path of docs/ARCHITECTURE.md: a file, a function of it, and the name by
// which it is called, if that is another one.
var stop = regexp.MustCompile(`^( *)([a-z_/]+\.go) ([A-Za-z]+)(?: as ([A-Za-z]+))?$`)

// TestPaths walks the paths that docs/ARCHITECTURE.md draws: each function is where the drawing has
// it, and calls those that are drawn below it. None has more stops or files than its title says.
func TestPaths(t *testing.T) {
	text, err := os.ReadFile("docs/ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "\n## Three paths\n")
	section, _, _ = strings.Cut(section, "\n## ")
	most := map[string][2]int{"A look-up": {25, 10}, "A save": {24, 12}, "A load from a GPU": {30, 14}}
	for _, part := range strings.Split(section, "\n### ")[1:] {
		title, rest, _ := strings.Cut(part, "\n")
		_, drawing, found := strings.Cut(rest, "```text\n")
		drawing, _, _ = strings.Cut(drawing, "```")
		limit, known := most[title]
		if !found || !known {
			t.Errorf("%q: no drawing, or no limit", title)
		}
		delete(most, title)
		if stops, files := walk(t, title, drawing); stops > limit[0] || files > limit[1] {
			t.Errorf("%s: %d stops in %d files, allowed: %d in %d", title, stops, files, limit[0], limit[1])
		}
	}
	if len(most) > 0 {
		t.Errorf("not drawn: %v", most)
	}
}

func walk(t *testing.T, title, drawing string) (stops, files int) {
	t.Helper()
	var callers []*ast.FuncDecl // by depth
	seen := map[string]bool{}
	for line := range strings.Lines(drawing) {
		m := stop.FindStringSubmatch(strings.TrimRight(line, "\n"))
		if m == nil {
			t.Errorf("%s: %q is no stop", title, line)
			continue
		}
		depth, file, name, called := len(m[1])/2, m[2], m[3], m[3]
		if m[4] != "" {
			called = m[4]
		}
		f := function(t, file, name, callers, depth, called)
		if f == nil {
			t.Errorf("%s: %s has no %s that the function above calls as %s", title, file, name, called)
			return stops, len(seen)
		}
		callers = append(callers[:depth], f)
		stops, seen[file] = stops+1, true
	}
	return stops, len(seen)
}

// function returns a function of a file that the caller at the depth before calls; of those with
// the name the one with most lines.
func function(t *testing.T, file, name string, callers []*ast.FuncDecl, depth int, called string) (f *ast.FuncDecl) {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil || depth > len(callers) || depth > 0 && !calls(callers[depth-1], called) {
		return nil
	}
	for _, d := range parsed.Decls {
		if one, ok := d.(*ast.FuncDecl); ok && one.Name.Name == name &&
			(f == nil || one.End()-one.Pos() > f.End()-f.Pos()) {
			f = one
		}
	}
	return f
}

// calls reports whether a function has a call of that name.
func calls(f *ast.FuncDecl, name string) (found bool) {
	ast.Inspect(f.Body, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		names := []ast.Expr{call.Fun}
		for _, e := range slices.Concat(names, call.Args) {
			switch e := e.(type) {
			case *ast.Ident:
				found = found || e.Name == name
			case *ast.SelectorExpr:
				found = found || e.Sel.Name == name
			}
		}
		return !found
	})
	return found
}

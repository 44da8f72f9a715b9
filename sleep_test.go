package kvagent_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"slices"
	"strings"
	"testing"
)

// sleepsAllowed has the functions of tests, and of packages for tests, that may sleep in real time,
// with the reason. A test waits by an event, such as a channel, a pidfd or a line of a log, or by
// one of the helpers here that poll. One that does not sleep any more is an error.
var sleepsAllowed = map[string]string{
	"pool/pooltest.Until":                    "polls what has no event",
	"ipc.connectLocked":                      "waits for a socket that nobody serves yet",
	"cudaipc/devicetest.Until":               "polls what has no event, without pools",
	"ipc.TestConnStoppedWithinAFrame":        "a process that is stopped longer than a frame may take",
	"pool/servertest.start":                  "polls a process that begins to listen",
	"pool/tier.waitFor":                      "polls, for the bubbles of synctest too",
	"pool/tier.breaks":                       "is called in bubbles, from a table",
	"pool/tier.mends":                        "is called in bubbles, from a table",
	"pool/tier.closes":                       "is called in bubbles, from a table",
	"transfer.start":                         "a kernel that takes its time",
	"cudaipc/mover.Import":                   "an import that takes its time",
	"transfer.Release":                       "is called in a bubble, by an interface",
	"transfer.endLate":                       "is called in a bubble, by an interface",
	"pool/peer.deliver":                      "a link that takes its time",
	"pool/peer.TestRequeuePause":             "in a bubble, from a hook",
	"agent.mark":                             "a hand-over that takes its time",
	"agent.TestTransfersAtRandom":            "pauses between cuts of the connection",
	"python/tests/agent.py":                  "polls what has no event",
	"python/tests/gpu/agents.py":             "polls an agent's status",
	"python/tests/gpu/engines.py":            "an engine that is idle, stepped as its own loop would",
	"python/tests/gpu/kit.py":                "polls a group of processes that was killed",
	"python/tests/vllm/tiered.py":            "a GPU's step that takes its time",
	"python/tests/pd/test_many.py":           "kills come at random moments",
	"python/tests/pd/traffic.py":             "an agent that is stopped half of the time",
	"python/tests/vllm/test_engine_storm.py": "pauses between blows, and those of a stopped agent",
}

// sleepCalls are what sleeps by itself, and what does so with a duration in milliseconds or less: a
// long one is the end of a wait for an event.
var sleepCalls, shortSleepCalls = []string{"Sleep", "Tick"}, []string{"After", "AfterFunc", "NewTimer", "NewTicker"}

// testDeclaration is a function, or a variable, of a package's tests.
type testDeclaration struct {
	name   string
	sleeps []token.Position // not in a bubble of synctest
	uses   map[string]bool  // names that it refers to outside of one
	inside map[string]bool  // and inside
}

// TestTestsDoNotSleep: tests wait for events, and run timers in bubbles of synctest.
func TestTestsDoNotSleep(t *testing.T) {
	files := token.NewFileSet()
	packages := map[string][]*testDeclaration{}
	used := map[string]bool{}
	allowed := func(name string) bool {
		_, ok := sleepsAllowed[name]
		used[name] = used[name] || ok
		return ok
	}
	eachFile(t, func(name, text string) {
		if strings.HasPrefix(name, "python/tests/") && strings.Contains(text, "time.sleep(") && !allowed(name) {
			t.Errorf("%s sleeps: %s", name, sleepCure)
		}
		if !isGoTest(name) {
			return
		}
		file, err := parser.ParseFile(files, name, text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			packages[path.Dir(name)] = append(packages[path.Dir(name)], declarations(files, d)...)
		}
	})
	for folder, all := range packages {
		bubbled := inBubbles(all)
		for _, d := range all {
			if len(d.sleeps) == 0 || bubbled[d.name] || allowed(folder+"."+d.name) {
				continue
			}
			for _, at := range d.sleeps {
				t.Errorf("%v: %s sleeps: %s", at, d.name, sleepCure)
			}
		}
	}
	for name, reason := range sleepsAllowed {
		if !used[name] {
			t.Errorf("%s does not sleep: delete its exception (%s)", name, reason)
		}
	}
}

const sleepCure = "wait for an event, poll by pooltest.Until or devicetest.Until, or run in a bubble of " +
	"testing/synctest; a pause that is the test's subject is an exception in sleepsAllowed"

// isGoTest reports whether a file is Go code of tests: of their own, or for those of others.
func isGoTest(name string) bool {
	folder := path.Dir(name)
	return strings.HasSuffix(name, "_test.go") || path.Ext(name) == ".go" &&
		slices.Contains([]string{"pool/pooltest", "pool/servertest", "cudaipc/devicetest"}, folder)
}

// declarations returns the functions and variables of a declaration.
func declarations(files *token.FileSet, d ast.Decl) (all []*testDeclaration) {
	add := func(name string, n ast.Node) {
		one := &testDeclaration{name: name, uses: map[string]bool{}, inside: map[string]bool{}}
		one.look(files, n, false)
		all = append(all, one)
	}
	switch d := d.(type) {
	case *ast.FuncDecl:
		if d.Body != nil {
			add(d.Name.Name, d.Body)
		}
	case *ast.GenDecl:
		for _, s := range d.Specs {
			if v, ok := s.(*ast.ValueSpec); ok {
				for _, value := range v.Values {
					add(v.Names[0].Name, value)
				}
			}
		}
	}
	return all
}

// look notes what a node refers to, and where it sleeps.
func (d *testDeclaration) look(files *token.FileSet, n ast.Node, bubble bool) {
	ast.Inspect(n, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if opensBubble(n) && !bubble {
				for _, arg := range n.Args {
					d.look(files, arg, true)
				}
				return false
			}
			if !bubble && sleepsReally(n) {
				d.sleeps = append(d.sleeps, files.Position(n.Pos()))
			}
		case *ast.Ident:
			if bubble {
				d.inside[n.Name] = true
			} else {
				d.uses[n.Name] = true
			}
		}
		return true
	})
}

// opensBubble reports whether the functions that a call is given run in a bubble of synctest.
func opensBubble(call *ast.CallExpr) bool {
	name, ok := call.Fun.(*ast.Ident)
	return isCall(call, "synctest", "Test") || ok && name.Name == "inBubble"
}

// sleepsReally reports whether a call sleeps, or makes a short timer.
func sleepsReally(call *ast.CallExpr) bool {
	if slices.ContainsFunc(sleepCalls, func(name string) bool { return isCall(call, "time", name) }) {
		return true
	}
	return len(call.Args) > 0 && isShort(call.Args[0]) &&
		slices.ContainsFunc(shortSleepCalls, func(name string) bool { return isCall(call, "time", name) })
}

// isShort reports whether an expression names milliseconds or less.
func isShort(duration ast.Expr) (short bool) {
	ast.Inspect(duration, func(n ast.Node) bool {
		if s, ok := n.(*ast.SelectorExpr); ok {
			short = short || slices.Contains([]string{"Millisecond", "Microsecond", "Nanosecond"}, s.Sel.Name)
		}
		return true
	})
	return short
}

func isCall(call *ast.CallExpr, from, name string) bool {
	s, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || s.Sel.Name != name {
		return false
	}
	x, ok := s.X.(*ast.Ident)
	return ok && x.Name == from
}

// inBubbles returns the declarations of a package that are referred to in bubbles alone, or by such
// declarations.
func inBubbles(all []*testDeclaration) (bubbled map[string]bool) {
	bubbled = map[string]bool{}
	for _, d := range all {
		for name := range d.inside {
			bubbled[name] = true
		}
		for name := range d.uses {
			bubbled[name] = true
		}
	}
	for _, d := range all {
		for _, prefix := range []string{"Test", "Benchmark", "Fuzz"} {
			if strings.HasPrefix(d.name, prefix) {
				delete(bubbled, d.name)
			}
		}
	}
	for changed := true; changed; {
		changed = false
		for _, d := range all {
			if bubbled[d.name] {
				continue
			}
			for name := range d.uses {
				if bubbled[name] && name != d.name {
					delete(bubbled, name)
					changed = true
				}
			}
		}
	}
	return bubbled
}

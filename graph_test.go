// Package kvagent_test checks the shape of the module: its import graph, the sizes of its folders,
// the widths of its lines.
package kvagent_test

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/kvagent/kvagent"

// mayImport is the import graph of docs/ARCHITECTURE.md: for each package, what it may import of
// the module. A trailing /... stands for the packages below. Tests may import anything.
var mayImport = map[string][]string{
	"settings":        {"secret"},
	"secret":          {},
	"trace":           {},
	"trace/tracetest": {},
	"pagefault":       {},
	"crc32c":          {},
	"pool":            {"crc32c"},
	"connlimit":       {},
	"backoff":         {},
	"pool/...":        {"pool"},
	"pool/tier": {"pool", "pool/tier/catalog", "pool/tier/names", "pool/tier/transit", "pagefault",
		"backoff"},
	"pool/tier/names":     {"pool", "pool/tier/catalog", "pool/tier/transit"},
	"pool/dram":           {"pool", "pagefault", "pool/dram/..."},
	"pool/advisor":        {"pool"},
	"pool/evict":          {"pool", "pool/advisor"},
	"pool/dram/arena":     {"pool", "pagefault"},
	"pool/dram/offheap":   {"pool"},
	"pool/pooltest":       {"pool", "pagefault"},
	"pool/evict/evictsim": {"pool", "pool/advisor", "trace"},
	"pool/peer":           {"pool", "pool/peer/...", "pagefault", "connlimit", "backoff", "secret"},
	"pool/peer/allow":     {},
	"pool/peer/seal":      {},
	"pool/disk":           {"pool", "backoff"},
	"pool/redis":          {"pool", "pool/remote", "backoff"},
	"pool/s3":             {"pool", "pool/remote"},
	"pool/mooncake":       {"pool", "pool/remote", "backoff"},
	"pool/tierspec":       {"pool", "pool/...", "settings", "secret"},
	"cudaipc":             {"crc32c", "pagefault"},
	"cudaipc/driver":      {},
	"cudaipc/host":        {"crc32c", "cudaipc", "pagefault"},
	"cudaipc/cuda":        {"crc32c", "cudaipc", "cudaipc/driver", "pagefault"},
	"cudaipc/mover":       {"cudaipc", "cudaipc/cuda", "cudaipc/host", "cudaipc/node", "backoff"},
	"cudaipc/node":        {"cudaipc"},
	"cudaipc/engine":      {"cudaipc", "cudaipc/cuda", "cudaipc/driver"},
	"cudaipc/devicetest":  {"cudaipc", "cudaipc/cuda", "cudaipc/engine", "cudaipc/host", "cudaipc/mover"},
	"ipc":                 {"ipc/peercred", "ipc/socketdir", "connlimit"},
	"ipc/socketdir":       {},
	"ipc/peercred":        {},
	"lookup":              {"pool"},
	"transfer":            {"pool", "cudaipc", "transfer/pace"},
	"transfer/pace":       {},
	"agent": {"agent/lease", "agent/registration", "agent/report", "lookup", "transfer", "transfer/pace", "ipc",
		"ipc/socketdir", "ipc/peercred", "cudaipc", "pool", "pagefault", "connlimit"},
	"agent/report": {"cudaipc", "ipc", "pool", "transfer", "transfer/pace"},
	"agent/guests": {"agent/admin", "agent/delivery", "agent/events", "agent/history", "agent/hints", "agent/raise",
		"ipc", "lookup", "pool", "transfer"},
	"agent/admin": {"agent/delivery", "agent/events", "agent/history", "agent/hints", "agent/page", "agent/report",
		"ipc/socketdir", "connlimit", "pool", "pool/peer"},
	"agent/delivery": {"ipc", "lookup", "pool", "backoff"},
	"agent/events":   {"ipc", "lookup", "pool"},
	"agent/history":  {"agent/report", "ipc", "pool"},
	"agent/hints":    {"ipc", "lookup", "pool"},
	"agent/lease":    {"pool"},
	"agent/page":     {"third_party/uplot"},
	"agent/peering": {"agent/admin", "agent/delivery", "agent/guests", "ipc", "pool", "pool/dram", "pool/mooncake",
		"pool/peer", "pool/peer/allow", "settings"},
	"agent/raise":        {"pool"},
	"agent/registration": {"transfer", "ipc", "ipc/socketdir", "cudaipc"},
	"agent/adminclient": {"agent/admin", "agent/delivery", "agent/hints", "agent/history", "agent/report", "cudaipc",
		"pool", "settings"},
	"mockengine":        {"ipc", "cudaipc", "cudaipc/engine", "trace"},
	"proof":             {"cudaipc", "cudaipc/...", "pool", "pool/dram", "transfer", "transfer/pace"},
	"third_party/uplot": {},
	"takeover":          {"ipc/socketdir", "pool/dram"},
	"lab":               {"lab/...", "settings"},
	"lab/...":           {"..."},
	"cmd/kvagent":       {"..."}, // but nothing of the lab: TestAgentLinksNoLab
	"cmd/kvbench":       {"lab"},
}

// core are the packages that every request passes, and what they are made of. All others are
// guests, which cmd/kvagent joins with it, or belong to a lab.
var core = []string{
	"agent", "agent/lease", "agent/registration", "agent/report", "lookup", "transfer", "transfer/pace", "ipc",
	"ipc/...", "cudaipc", "cudaipc/...", "pool", "pool/dram", "pool/dram/...", "takeover", "settings",
	"backoff", "connlimit", "crc32c", "pagefault", "secret",
}

// mayUseC lists the packages that may call C, each one library: foreign code lives in one package,
// with checked types.
var mayUseC = map[string]string{"cudaipc/driver": "the CUDA driver"}

// noNames are names of packages that name nothing.
var noNames = []string{"util", "utils", "common", "helper", "helpers", "types", "manager", "misc", "base"}

type goPackage struct {
	ImportPath string
	Name       string
	Imports    []string // of the files that are not tests
	CgoFiles   []string

	TestImports, XTestImports []string
}

func TestImportGraph(t *testing.T) {
	for _, p := range listPackages(t) {
		name := inModule(p.ImportPath)
		if name == "." {
			continue
		}
		allowed, known := rule(name)
		if !known {
			t.Errorf("package %s is not in the import graph: give it a line in graph_test.go and in "+
				"docs/ARCHITECTURE.md, or put its code where it belongs", name)
			continue
		}
		for _, imported := range p.Imports {
			if !strings.HasPrefix(imported, module+"/") || within(inModule(imported), allowed) {
				continue
			}
			t.Errorf("%s imports %s, but may import only %s: pass what it needs from above (an argument, a func, or "+
				"an interface that %s declares), or move the code to the package that owns the noun",
				name, inModule(imported), list(allowed), name)
		}
	}
}

func TestTheCoreImportsNoGuest(t *testing.T) {
	for _, p := range listPackages(t) {
		name := inModule(p.ImportPath)
		if !within(name, core) {
			continue
		}
		for _, imported := range p.Imports {
			if strings.HasPrefix(imported, module+"/") && !within(inModule(imported), core) {
				t.Errorf("%s is of the core and imports %s, which is not: give the core a seam that a guest fills",
					name, inModule(imported))
			}
		}
	}
}

func TestForeignCodeLivesInOnePackage(t *testing.T) {
	for _, p := range listPackages(t) {
		name := inModule(p.ImportPath)
		if _, may := mayUseC[name]; len(p.CgoFiles) > 0 && !may {
			t.Errorf("%s imports \"C\" in %v, but only %v may: put the foreign call there, with a checked type", name,
				p.CgoFiles, mayUseC)
		}
	}
}

// ofTheLab has prefixes of the import paths that kvbench and tests may link, and the program that
// runs on nodes must not.
var ofTheLab = []string{module + "/lab", module + "/mockengine", module + "/pool/evict/evictsim", module + "/trace"}

func TestAgentLinksNoLab(t *testing.T) {
	for _, tags := range []string{"", "cuda"} {
		out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-tags", tags, "./cmd/kvagent").Output()
		if err != nil {
			t.Fatalf("go list: %v", err)
		}
		for p := range strings.FieldsSeq(string(out)) {
			for _, lab := range ofTheLab {
				if p == lab || strings.HasPrefix(p, lab+"/") {
					t.Errorf("cmd/kvagent links %s: what the agent needs of it belongs in a package of its own", p)
				}
			}
		}
	}
}

// TestProgramsLinkNoLibzmq checks that both programs start on a node without libzmq.
func TestProgramsLinkNoLibzmq(t *testing.T) {
	for _, tags := range []string{"", "cuda"} {
		out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-tags", tags, "./cmd/kvagent",
			"./cmd/kvbench").Output()
		if err != nil {
			t.Fatalf("go list: %v", err)
		}
		if strings.Contains(string(out), "github.com/pebbe/zmq4") {
			t.Errorf("with the tags %q the programs link libzmq", tags)
		}
	}
}

// TestNoCUDAWithoutItsTag checks that no build without the tag cuda imports cu, which make's flags
// let every build compile.
func TestNoCUDAWithoutItsTag(t *testing.T) {
	for _, p := range listPackages(t) {
		for _, imported := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			if imported == "gorgonia.org/cu" || strings.HasPrefix(imported, "gorgonia.org/cu/") {
				t.Errorf("%s imports %s in a build without CUDA: put //go:build cuda at the head of that file",
					inModule(p.ImportPath), imported)
			}
		}
	}
}

func TestPackagesAreNamedForAThing(t *testing.T) {
	for _, p := range listPackages(t) {
		if base := path.Base(p.ImportPath); slices.Contains(noNames, base) || slices.Contains(noNames, p.Name) {
			t.Errorf("package %s is named for nothing in particular: name it for the one thing it is about, or put "+
				"its code next to its callers", inModule(p.ImportPath))
		}
	}
}

func listPackages(t *testing.T) []goPackage {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list",
		"-json=ImportPath,Name,Imports,CgoFiles,TestImports,XTestImports", "./...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	var packages []goPackage
	for decoder := json.NewDecoder(bytes.NewReader(out)); decoder.More(); {
		var p goPackage
		if err := decoder.Decode(&p); err != nil {
			t.Fatalf("go list: %v", err)
		}
		packages = append(packages, p)
	}
	if len(packages) < len(mayImport)/2 {
		t.Fatalf("go list found %d packages: this test looks at the wrong folder", len(packages))
	}
	return packages
}

// inModule returns the path of a package below the module, "." for its root.
func inModule(importPath string) string {
	return path.Clean("./" + strings.TrimPrefix(importPath, module))
}

// rule returns the entry of mayImport for a package: its own, or that of the nearest folder above
// with /... .
func rule(name string) (allowed []string, known bool) {
	if allowed, known = mayImport[name]; known {
		return allowed, true
	}
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		if allowed, known = mayImport[dir+"/..."]; known {
			return allowed, true
		}
	}
	return nil, false
}

func within(name string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		below, isTree := strings.CutSuffix(pattern, "...")
		return name == pattern || isTree && strings.HasPrefix(name, below)
	})
}

func list(names []string) string {
	if len(names) == 0 {
		return "nothing of the module"
	}
	return strings.Join(names, ", ")
}

// Package mixintest checks deploy/mixin against the metrics that the real agent exports.
package mixintest

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"sigs.k8s.io/yaml"
)

type rule struct {
	Record      string            `json:"record"`
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

// readRules returns all rules; a field that is not known is an error.
func readRules(t *testing.T) []rule {
	t.Helper()
	var file struct {
		Groups []struct {
			Name  string `json:"name"`
			Rules []rule `json:"rules"`
		} `json:"groups"`
	}
	if err := yaml.UnmarshalStrict(read(t, "../mixin/rules.yaml"), &file); err != nil {
		t.Fatal(err)
	}
	var all []rule
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// expressions returns every expression of the rules and dashboards, by where it stands.
func expressions(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, r := range readRules(t) {
		all["rules.yaml: "+r.Record+r.Alert] = r.Expr
	}
	for _, name := range []string{"fleet.json", "node.json"} {
		var board struct {
			Panels []struct {
				Title   string
				Targets []struct{ RefID, Expr string }
			}
		}
		if err := json.Unmarshal(read(t, filepath.Join("../mixin", name)), &board); err != nil {
			t.Fatal(err)
		}
		if len(board.Panels) == 0 {
			t.Errorf("%s: no panels", name)
		}
		for _, p := range board.Panels {
			if len(p.Targets) == 0 {
				t.Errorf("%s: panel %q has no target", name, p.Title)
			}
			for _, x := range p.Targets {
				all[fmt.Sprintf("%s: %s: %s", name, p.Title, x.RefID)] = x.Expr
			}
		}
	}
	return all
}

// needsGPU holds the metrics that an agent without a GPU legitimately has no series of.
var needsGPU = map[string]bool{
	"kvagent_mover_lost_total": true, "kvagent_mover_failing": true, "kvagent_mover_running": true,
}

// TestExpressionsHaveSeries fails for an expression that does not parse, and for a selector that
// picks no series of a live agent: a metric that is renamed, a label's value that is not exported.
func TestExpressionsHaveSeries(t *testing.T) {
	series := scrape(t)
	for at, text := range expressions(t) {
		expr, err := parser.ParseExpr(text)
		if err != nil {
			t.Errorf("%s: %v", at, err)
			continue
		}
		parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
			s, ok := n.(*parser.VectorSelector)
			if ok && s.Name != "up" && !needsGPU[s.Name] && !picksAny(s.LabelMatchers, series) {
				t.Errorf("%s: %s picks no series of the agent", at, s)
			}
			return nil
		})
	}
}

// picksAny ignores the labels that Prometheus adds to a target's series.
func picksAny(matchers []*labels.Matcher, series []labels.Labels) bool {
next:
	for _, l := range series {
		for _, m := range matchers {
			if m.Name != "instance" && m.Name != "job" && !m.Matches(l.Get(m.Name)) {
				continue next
			}
		}
		return true
	}
	return false
}

// TestRunbooks holds that each alert has a severity, a summary and a section of the runbooks.
func TestRunbooks(t *testing.T) {
	page := string(read(t, "../../docs/RUNBOOKS.md"))
	alerts := 0
	for _, r := range readRules(t) {
		if r.Alert == "" {
			continue
		}
		alerts++
		if !strings.HasSuffix(r.Annotations["runbook_url"], "docs/RUNBOOKS.md#"+strings.ToLower(r.Alert)) {
			t.Errorf("%s: runbook_url %q", r.Alert, r.Annotations["runbook_url"])
		}
		if !strings.Contains(page, "\n## "+r.Alert+"\n") {
			t.Errorf("%s: no section in docs/RUNBOOKS.md", r.Alert)
		}
		severity := r.Labels["severity"]
		if r.Annotations["summary"] == "" || r.For == "" || severity != "warning" && severity != "critical" {
			t.Errorf("%s: summary, for or severity is missing", r.Alert)
		}
	}
	if sections := strings.Count(page, "\n## "); sections != alerts {
		t.Errorf("%d sections in docs/RUNBOOKS.md for %d alerts", sections, alerts)
	}
}

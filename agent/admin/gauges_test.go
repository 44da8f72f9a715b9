package admin

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/evict"
)

// reported is a policy's report as a collector.
type reported struct{ report pool.PolicyReport }

func (reported) Describe(ch chan<- *prometheus.Desc)   { describePolicy(ch) }
func (r reported) Collect(ch chan<- prometheus.Metric) { collectPolicy(ch, &r.report) }

// TestPolicyMetrics holds the series of the eviction policy: there from the start, well named, one
// for each class.
func TestPolicyMetrics(t *testing.T) {
	h := evict.NewHazard()
	h.Insert(&pool.Insertion{BlockTokens: 16, Entries: []uint32{1}, Prints: []uint64{7}})
	h.Access(&pool.Use{Now: 60e9, BlockTokens: 16, Entries: []uint32{1}, Prints: []uint64{7, 8}})
	report := h.Report()
	registry := prometheus.NewPedanticRegistry()
	check(t, registry.Register(reported{report}))
	families, err := registry.Gather()
	check(t, err)
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	check(t, err)
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	series, worth := map[string]int{}, 0.
	for _, f := range families {
		series[f.GetName()] = len(f.GetMetric())
		if f.GetName() == "kvagent_eviction_class_worth_hits_per_hour" {
			worth = f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	for name, want := range map[string]int{
		"kvagent_eviction_info": 1, "kvagent_eviction_entries": 1, "kvagent_eviction_alarms_total": 1,
		"kvagent_eviction_fallback":       1,
		"kvagent_eviction_missing_blocks": 1, "kvagent_eviction_miss_budget_blocks": 1,
		"kvagent_eviction_hits_total": 1, "kvagent_eviction_shadow_lru_hits_total": 1,
		"kvagent_eviction_class_worth_hits_per_hour": len(report.Classes),
		"kvagent_eviction_class_evicted_total":       len(report.Classes),
	} {
		if series[name] != want || want == 0 {
			t.Errorf("%d series %s, want %d", series[name], name, want)
		}
	}
	if worth <= 0 {
		t.Errorf("a class is worth %g hits per hour", worth)
	}
}

// TestStatusTellsOfEviction reports a policy in status, as it stands beside LRU.
func TestStatusTellsOfEviction(t *testing.T) {
	got := poolStatus(&pool.Stats{Policy: pool.PolicyReport{Name: "p", Lookups: 9, Hits: 3, ShadowHits: 4, Alarms: 2,
		Fallback: true, LookupsDropped: 1}}).Eviction
	want := EvictionStatus{Policy: "p", LookedUp: 9, Hits: 3, ShadowLRU: 4, Alarms: 2, Fallback: true, Dropped: 1}
	if got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

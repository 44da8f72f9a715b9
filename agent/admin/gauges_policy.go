package admin

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvagent/kvagent/pool"
)

// policySeries say how the eviction policy does beside LRU.
var policySeries = []struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	get  func(r *pool.PolicyReport) float64
}{
	{desc("kvagent_eviction_entries", "Blocks the eviction policy has."), prometheus.GaugeValue, func(r *pool.PolicyReport) float64 { return float64(r.Entries) }},
	{desc("kvagent_eviction_ghosts", "Blocks the eviction policy remembers after they went."), prometheus.GaugeValue, func(r *pool.PolicyReport) float64 { return float64(r.Ghosts) }},
	{desc("kvagent_eviction_bytes", "Memory of the eviction policy, bytes."), prometheus.GaugeValue, func(r *pool.PolicyReport) float64 { return float64(r.Bytes) }},
	{desc("kvagent_eviction_lookups_total", "Blocks that were looked up."), prometheus.CounterValue, func(r *pool.PolicyReport) float64 { return float64(r.Lookups) }},
	{desc("kvagent_eviction_hits_total", "Blocks looked up that were stored."), prometheus.CounterValue, func(r *pool.PolicyReport) float64 { return float64(r.Hits) }},
	{desc("kvagent_eviction_shadow_lru_hits_total", "Blocks looked up that LRU would have had."), prometheus.CounterValue, func(r *pool.PolicyReport) float64 { return float64(r.ShadowHits) }},
	{desc("kvagent_eviction_margin_blocks", "Hits by which the policy may still fall behind LRU before it forgets what it learned."), prometheus.GaugeValue, func(r *pool.PolicyReport) float64 { return r.Margin }},
	{desc("kvagent_eviction_missing_blocks", "Blocks that LRU would have and the policy gave up."), prometheus.GaugeValue, func(r *pool.PolicyReport) float64 { return float64(r.Missing) }},
	{desc("kvagent_eviction_may_miss_blocks", "Blocks that may be missing so; beyond them LRU decides."), prometheus.GaugeValue, func(r *pool.PolicyReport) float64 { return r.MayMiss }},
	{desc("kvagent_eviction_alarms_total", "Times the policy fell behind LRU, forgot most of what it had learned, and let LRU decide for a while."), prometheus.CounterValue, func(r *pool.PolicyReport) float64 { return float64(r.Alarms) }},
	{desc("kvagent_eviction_humble", "1 while LRU decides, after an alarm."), prometheus.GaugeValue, func(r *pool.PolicyReport) float64 {
		if r.Humble {
			return 1
		}
		return 0
	}},
	{desc("kvagent_eviction_untold_total", "Look-ups the policy was not told of, because too many were waiting."), prometheus.CounterValue, func(r *pool.PolicyReport) float64 { return float64(r.Untold) }},
}

var (
	policyInfoDesc    = prometheus.NewDesc("kvagent_eviction_info", "1 for the eviction policy in charge.", []string{"policy"}, nil)
	classEntriesDesc  = classDesc("entries", "Blocks of a class of the eviction policy.")
	classEvictedDesc  = classDesc("evicted_total", "Blocks that went, by class.")
	classWorthDesc    = classDesc("worth_hits_per_hour", "Hits that a block of a class is expected to give per hour it is kept, right after a use.")
	classWorthLowDesc = classDesc("worth_next_hits_per_hour", "The same for the block of a class that goes next; 0 if there is none.")
)

func classDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("kvagent_eviction_class_"+name, help, []string{"class"}, nil)
}

func describePolicy(ch chan<- *prometheus.Desc) {
	for _, s := range policySeries {
		ch <- s.desc
	}
	for _, d := range []*prometheus.Desc{policyInfoDesc, classEntriesDesc, classEvictedDesc, classWorthDesc, classWorthLowDesc} {
		ch <- d
	}
}

func collectPolicy(ch chan<- prometheus.Metric, r *pool.PolicyReport) {
	for _, s := range policySeries {
		ch <- prometheus.MustNewConstMetric(s.desc, s.kind, s.get(r))
	}
	ch <- prometheus.MustNewConstMetric(policyInfoDesc, prometheus.GaugeValue, 1, r.Name)
	for i := range r.Classes {
		c := &r.Classes[i]
		ch <- prometheus.MustNewConstMetric(classEntriesDesc, prometheus.GaugeValue, float64(c.Entries), c.Name)
		ch <- prometheus.MustNewConstMetric(classEvictedDesc, prometheus.CounterValue, float64(c.Evicted), c.Name)
		ch <- prometheus.MustNewConstMetric(classWorthDesc, prometheus.GaugeValue, c.Worth, c.Name)
		ch <- prometheus.MustNewConstMetric(classWorthLowDesc, prometheus.GaugeValue, c.WorthNext, c.Name)
	}
}

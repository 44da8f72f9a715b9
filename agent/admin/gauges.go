package admin

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

func oneIf(on bool) float64 {
	if on {
		return 1
	}
	return 0
}

// gauges read one snapshot for all their series.
type gauges struct{ view *View }

// levelSeries are gauges of the registry, the sessions and the configuration.
var levelSeries = []struct {
	desc *prometheus.Desc
	get  func(*Snapshot) float64
}{
	{desc("kvagent_regions", "Regions of engines' memory that are open."),
		func(s *Snapshot) float64 { return float64(s.Regions) }},
	{desc("kvagent_sessions", "Session sockets that are open."),
		func(s *Snapshot) float64 { return float64(s.Sessions) }},
	{desc("kvagent_jobs", "Jobs whose completion is not reported yet."),
		func(s *Snapshot) float64 { return float64(s.Jobs) }},
	{desc("kvagent_workers_stuck", "Workers whose current step is older than the limit."),
		func(s *Snapshot) float64 { return float64(s.Stuck) }},
	{desc("kvagent_switch_loads", "1: loads are on."), func(s *Snapshot) float64 { return oneIf(s.Switches.Loads) }},
	{desc("kvagent_switch_saves", "1: saves are on."), func(s *Snapshot) float64 { return oneIf(s.Switches.Saves) }},
	{desc("kvagent_engines_complete", "Engines with all ranks registered."),
		func(s *Snapshot) float64 { return float64(s.EnginesComplete) }},
	{desc("kvagent_start_time_seconds", "Unix time of the agent's start, in seconds."),
		func(s *Snapshot) float64 { return float64(s.Since.UnixNano()) / 1e9 }},
	{desc("kvagent_lease_cap_bytes", "Bytes one engine may lease."),
		func(s *Snapshot) float64 { return float64(s.LeaseCap) }},
	{desc("kvagent_pending_descriptors", "Descriptors of registrations that are not complete."),
		func(s *Snapshot) float64 { return float64(s.PendingFDs) }},
	{desc("kvagent_lookup_sockets", "Look-up sockets that are open."),
		func(s *Snapshot) float64 { return float64(len(s.Sockets)) }},
}

type series struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	get  func(*pool.Stats) float64
}

func desc(name, help string) *prometheus.Desc { return prometheus.NewDesc(name, help, nil, nil) }

var poolSeries = []series{
	{desc("kvagent_pool_capacity_bytes", "Bytes of the pool."), prometheus.GaugeValue,
		func(s *pool.Stats) float64 { return float64(s.Capacity) }},
	{desc("kvagent_pool_used_bytes", "Bytes of used slots."), prometheus.GaugeValue,
		func(s *pool.Stats) float64 { return float64(s.Used) }},
	{desc("kvagent_pool_pinned_bytes", "Bytes of pinned slots."), prometheus.GaugeValue,
		func(s *pool.Stats) float64 { return float64(s.Pinned) }},
	{desc("kvagent_pool_ready_bytes", "Bytes of the pool that are populated."), prometheus.GaugeValue,
		func(s *pool.Stats) float64 { return float64(s.Ready) }},
	{desc("kvagent_pool_index_bytes", "Memory of the index in use, bytes."), prometheus.GaugeValue,
		func(s *pool.Stats) float64 { return float64(s.IndexBytes) }},
	{desc("kvagent_pool_entries", "Blocks stored whole, with all their shards."), prometheus.GaugeValue,
		func(s *pool.Stats) float64 { return float64(s.Entries) }},
	{desc("kvagent_pool_entries_partial", "Blocks that lack shards."), prometheus.GaugeValue,
		func(s *pool.Stats) float64 { return float64(s.Partial) }},
	{desc("kvagent_pool_entries_pinned", "Blocks that are pinned."), prometheus.GaugeValue,
		func(s *pool.Stats) float64 { return float64(s.PinnedEntries) }},
	{desc("kvagent_pool_evicted_total", "Blocks evicted."), prometheus.CounterValue,
		func(s *pool.Stats) float64 { return float64(s.Evicted) }},
	{
		desc("kvagent_pool_evicted_bytes_total", "Bytes of the slots of evicted blocks."),
		prometheus.CounterValue, func(s *pool.Stats) float64 { return float64(s.EvictedBytes) },
	},
	{
		desc("kvagent_pool_moved_total", "Slots whose content was copied to another slot to free a slab."),
		prometheus.CounterValue, func(s *pool.Stats) float64 { return float64(s.Moved) },
	},
	{
		desc("kvagent_pool_moved_bytes_total", "Bytes of the slots that were copied to free a slab."),
		prometheus.CounterValue, func(s *pool.Stats) float64 { return float64(s.MovedBytes) },
	},
	{desc("kvagent_pool_dropped_total", "Blocks dropped as corrupt or by a reset."), prometheus.CounterValue,
		func(s *pool.Stats) float64 { return float64(s.Dropped) }},
	{desc("kvagent_pool_reassigned_total", "Slabs given to another size class."), prometheus.CounterValue,
		func(s *pool.Stats) float64 { return float64(s.Reassigned) }},
	{desc("kvagent_pool_file_full_total", "Times the pool's file could not grow, because its file system had no room."),
		prometheus.CounterValue, func(s *pool.Stats) float64 { return float64(s.FileFull) }},
	{
		desc("kvagent_pool_bad_pages", "Pages of the pool that cannot be read and are not used any more."),
		prometheus.GaugeValue, func(s *pool.Stats) float64 { return float64(s.Bad.Pages) },
	},
	{
		desc("kvagent_pool_bad_pages_limit", "Number of bad pages that makes the pool unhealthy."),
		prometheus.GaugeValue, func(s *pool.Stats) float64 { return float64(s.Bad.MaxPages) },
	},
	{
		desc("kvagent_pool_bad_bytes", "Bytes of the pool that are not used because of bad pages."),
		prometheus.GaugeValue, func(s *pool.Stats) float64 { return float64(s.Bad.Bytes) },
	},
	{
		desc("kvagent_pool_bad_bytes_limit", "Number of such bytes that makes the pool unhealthy."),
		prometheus.GaugeValue, func(s *pool.Stats) float64 { return float64(s.Bad.MaxBytes) },
	},
	{
		desc("kvagent_pool_bad_dropped_total", "Blocks dropped because they lay on a bad page."),
		prometheus.CounterValue, func(s *pool.Stats) float64 { return float64(s.Bad.Dropped) },
	},
	{
		desc("kvagent_pool_file_faults_total",
			"Times a page of the pool's file beside the blocks could not be touched."),
		prometheus.CounterValue, func(s *pool.Stats) float64 { return float64(s.Bad.Faults) },
	},
	{desc("kvagent_pool_busy_total", "Reservations refused because nothing more could be evicted."),
		prometheus.CounterValue, func(s *pool.Stats) float64 { return float64(s.Busy) }},
}

var (
	leasesDesc       = desc("kvagent_leases", "Leases that are open.")
	leaseBytesDesc   = desc("kvagent_lease_bytes", "Bytes pinned by leases.")
	leaseRevokedDesc = desc("kvagent_leases_revoked_total", "Leases revoked under pressure.")
	unsentDesc       = desc("kvagent_lookup_unsent_total",
		"Answers to look-ups that could not be sent: the client disconnected or does not read.")
	panicsDesc = desc("kvagent_lookup_panics_total",
		"Look-ups whose handler panicked; they were answered as overloaded.")
	droppedDesc = desc("kvagent_lookup_connections_dropped_total",
		"Connections to look-up sockets closed: not ZMTP, beyond its limits, stalled, or too many.")
	malformedDesc = prometheus.NewDesc("kvagent_lookup_malformed_total", "Malformed look-ups, by reason.",
		[]string{"reason"}, nil)
	enginesDesc = desc("kvagent_engines", "Engines that are registered, or registering.")
)

// Describe implements prometheus.Collector.
func (g *gauges) Describe(ch chan<- *prometheus.Desc) {
	for _, s := range levelSeries {
		ch <- s.desc
	}
	for _, s := range poolSeries {
		ch <- s.desc
	}
	ch <- leasesDesc
	ch <- leaseBytesDesc
	ch <- leaseRevokedDesc
	ch <- enginesDesc
	ch <- malformedDesc
	ch <- unsentDesc
	ch <- panicsDesc
	ch <- droppedDesc
	describePolicy(ch)
	describeTiers(ch)
	describeMovers(ch)
	describePaces(ch)
	describeLeft(ch)
	describeTransfers(ch)
	for _, d := range slices.Concat(eventDescs, keepDescs, ownersDescs) {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (g *gauges) Collect(ch chan<- prometheus.Metric) {
	now := g.view.source.Snapshot()
	for _, s := range levelSeries {
		ch <- prometheus.MustNewConstMetric(s.desc, prometheus.GaugeValue, s.get(&now))
	}
	for _, s := range poolSeries {
		ch <- prometheus.MustNewConstMetric(s.desc, s.kind, s.get(&now.Pool))
	}
	collectPolicy(ch, &now.Pool.Policy)
	collectTiers(ch, now.Tiers)
	collectMovers(ch, now.Movers)
	collectPaces(ch, now.Paces)
	collectOrphans(ch, now.Orphans)
	collectTransfers(ch, &now.Transfers)
	collectKeep(ch, &now.Keep)
	collectOwners(ch, &now.Pool.Owners)
	collectEvents(ch, &now.Events)
	collectPeers(ch, &now.Peers)
	ch <- prometheus.MustNewConstMetric(leasesDesc, prometheus.GaugeValue, float64(now.Leases))
	ch <- prometheus.MustNewConstMetric(leaseBytesDesc, prometheus.GaugeValue, float64(now.LeaseBytes))
	ch <- prometheus.MustNewConstMetric(leaseRevokedDesc, prometheus.CounterValue, float64(now.LeasesRevoked))
	ch <- prometheus.MustNewConstMetric(enginesDesc, prometheus.GaugeValue, float64(now.Engines))
	ch <- prometheus.MustNewConstMetric(unsentDesc, prometheus.CounterValue, float64(now.Lookups.Unsent))
	ch <- prometheus.MustNewConstMetric(panicsDesc, prometheus.CounterValue, float64(now.Lookups.Panics))
	ch <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue, float64(now.Lookups.Dropped))
	for reason, n := range now.Lookups.Reasons {
		ch <- prometheus.MustNewConstMetric(malformedDesc, prometheus.CounterValue, float64(n),
			ipc.Reason(reason).String())
	}
}

// policySeries compare the eviction policy with LRU.
var policySeries = []struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	get  func(r *pool.PolicyReport) float64
}{
	{desc("kvagent_eviction_entries", "Blocks that the eviction policy tracks."), prometheus.GaugeValue,
		func(r *pool.PolicyReport) float64 { return float64(r.Entries) }},
	{desc("kvagent_eviction_ghosts", "Evicted blocks that the eviction policy remembers."), prometheus.GaugeValue,
		func(r *pool.PolicyReport) float64 { return float64(r.Ghosts) }},
	{desc("kvagent_eviction_bytes", "Memory of the eviction policy, bytes."), prometheus.GaugeValue,
		func(r *pool.PolicyReport) float64 { return float64(r.Bytes) }},
	{desc("kvagent_eviction_lookups_total", "Blocks that were looked up."), prometheus.CounterValue,
		func(r *pool.PolicyReport) float64 { return float64(r.Lookups) }},
	{desc("kvagent_eviction_hits_total", "Blocks looked up that were stored."), prometheus.CounterValue,
		func(r *pool.PolicyReport) float64 { return float64(r.Hits) }},
	{desc("kvagent_eviction_shadow_lru_hits_total", "Blocks looked up that LRU would have had."),
		prometheus.CounterValue, func(r *pool.PolicyReport) float64 { return float64(r.ShadowHits) }},
	{desc("kvagent_eviction_missing_blocks", "Blocks that LRU would hold and the policy evicted."),
		prometheus.GaugeValue, func(r *pool.PolicyReport) float64 { return float64(r.Missing) }},
	{desc("kvagent_eviction_miss_budget_blocks", "Limit of kvagent_eviction_missing_blocks; beyond it LRU decides."),
		prometheus.GaugeValue, func(r *pool.PolicyReport) float64 { return r.MayMiss }},
	{desc("kvagent_eviction_alarms_total",
		"Times the policy lost too many hits to LRU, forgot most of what it had learned, and let LRU decide."),
		prometheus.CounterValue, func(r *pool.PolicyReport) float64 { return float64(r.Alarms) }},
	{desc("kvagent_eviction_fallback", "1 while LRU decides, after an alarm."), prometheus.GaugeValue,
		func(r *pool.PolicyReport) float64 {
			if r.Fallback {
				return 1
			}
			return 0
		}},
	{desc("kvagent_eviction_lookups_dropped_total",
		"Look-ups dropped from the policy's input queue because it was full."), prometheus.CounterValue,
		func(r *pool.PolicyReport) float64 { return float64(r.LookupsDropped) }},
}

var (
	policyInfoDesc = prometheus.NewDesc("kvagent_eviction_info", "1 for the eviction policy in charge.",
		[]string{"policy"}, nil)
	classEntriesDesc = classDesc("entries", "Blocks of a class of the eviction policy.")
	classEvictedDesc = classDesc("evicted_total", "Blocks evicted, by class.")
	classWorthDesc   = classDesc("worth_hits_per_hour",
		"Hits that a block of a class is expected to give per hour it is kept, right after a use.")
	classWorthLowDesc = classDesc("worth_next_hits_per_hour",
		"The same for the block of a class that is evicted next; 0 if there is none.")
)

func classDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("kvagent_eviction_class_"+name, help, []string{"class"}, nil)
}

func describePolicy(ch chan<- *prometheus.Desc) {
	for _, s := range policySeries {
		ch <- s.desc
	}
	for _, d := range []*prometheus.Desc{policyInfoDesc, classEntriesDesc, classEvictedDesc, classWorthDesc,
		classWorthLowDesc} {
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

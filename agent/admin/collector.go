package admin

import (
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// collector reads all metrics from the status and the counters, whose fields say by tags what they
// are:
//
//	Used   int64             `metric:"pool_used_bytes"`                   kvagent_pool_used_bytes
//	Hits   uint64            `metric:"tier_fetched_total{result=hit}"`    a series of a family
//	Tiers  []struct{ Name string `label:"tier"`; ... }                    a label of its series
//	Lost   map[string]uint64 `metric:"mover_lost_total" label:"reason"`   a series for each key
//	State  string            `metric:"tier_store_state" label:"state"`    1 for the value
//	Why    string            `metric:"pool_file_abandoned"`               1 if there is a text
//
// A family whose name ends in _total is a counter, another one a gauge. families has their help.
type collector struct{ view *View }

// Describe implements prometheus.Collector. Which series there are depends on what is switched on.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	status := c.view.Status()
	for _, from := range []any{&status, c.view.agent.Metrics()} {
		walk(reflect.ValueOf(from).Elem(), nil, func(family string, labels []label, value float64) {
			ch <- metric(family, labels, value)
		})
	}
}

type label struct{ name, value string }

type emit func(family string, labels []label, value float64)

func metric(family string, labels []label, value float64) prometheus.Metric {
	names, values := make([]string, len(labels)), make([]string, len(labels))
	for i, l := range labels {
		names[i], values[i] = l.name, l.value
	}
	kind := prometheus.GaugeValue
	if strings.HasSuffix(family, "_total") {
		kind = prometheus.CounterValue
	}
	desc := prometheus.NewDesc("kvagent_"+family, families[family], names, nil)
	return prometheus.MustNewConstMetric(desc, kind, value, values...)
}

// walk emits the series of a value and of all that is in it. labels are those of what it is in.
func walk(v reflect.Value, labels []label, out emit) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			walk(v.Elem(), labels, out)
		}
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			walk(v.Index(i), labels, out)
		}
	case reflect.Struct:
		walkStruct(v, labels, out)
	}
}

func walkStruct(v reflect.Value, labels []label, out emit) {
	t := v.Type()
	for i := range t.NumField() {
		tag := t.Field(i).Tag
		if name := tag.Get("label"); name != "" && tag.Get("metric") == "" {
			labels = append(slices.Clip(labels), label{name, v.Field(i).String()})
		}
	}
	for i := range t.NumField() {
		field := t.Field(i)
		if !field.IsExported() {
			continue
		}
		family, fixed := parseTag(field.Tag.Get("metric"))
		if family == "" {
			walk(v.Field(i), labels, out)
			continue
		}
		emitField(v.Field(i), family, field.Tag.Get("label"), append(slices.Clip(labels), fixed...), out)
	}
}

func emitField(v reflect.Value, family, name string, labels []label, out emit) {
	switch v.Kind() {
	case reflect.String:
		if name != "" && v.Len() > 0 {
			out(family, append(labels, label{name, v.String()}), 1)
		} else if name == "" {
			out(family, labels, float64(min(v.Len(), 1)))
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			out(family, append(slices.Clip(labels), label{name, key.String()}), number(v.MapIndex(key)))
		}
	default:
		out(family, labels, number(v))
	}
}

// parseTag splits NAME{LABEL=VALUE,...}.
func parseTag(tag string) (family string, labels []label) {
	family, rest, _ := strings.Cut(strings.TrimSuffix(tag, "}"), "{")
	for pair := range strings.SplitSeq(rest, ",") {
		if name, value, ok := strings.Cut(pair, "="); ok {
			labels = append(labels, label{name, value})
		}
	}
	return family, labels
}

// number returns a field's value in the metric's unit: seconds, or 1 for true.
func number(v reflect.Value) float64 {
	if v.Kind() != reflect.Pointer && v.CanAddr() {
		v = v.Addr()
	}
	switch n := v.Interface().(type) {
	case interface{ Load() uint64 }:
		return float64(n.Load())
	case *time.Time:
		return float64(n.UnixNano()) / 1e9
	}
	switch v = reflect.Indirect(v); {
	case v.CanInt():
		return float64(v.Int())
	case v.CanUint():
		return float64(v.Uint())
	case v.CanFloat():
		return v.Float()
	case v.Kind() == reflect.Bool && v.Bool():
		return 1
	}
	return 0
}

// families are the metrics, without kvagent_ before their names, and their help. The histograms of
// Metrics have theirs.
var families = map[string]string{
	"start_time_seconds": "Unix time of the agent's start, in seconds.",
	"switch":             "1: loads, or saves, are on.",
	"sessions":           "Session sockets that are open.",
	"engines":            "Engines that are registered with all, or some, of their ranks.",
	"jobs":               "Jobs whose completion is not reported yet.",
	"workers_stuck":      "Workers whose current step is older than 90 s.",

	"registrations_total": "Registrations by result, and peers that were kept out: not allowed, or one too many.",
	"session_ends_total":  "Session sockets that ended, by reason.",
	"resets_total":        "New weights epochs: begun here, adopted from another node, or repeated after a collision.",

	"lookups_total":       "Look-ups by the status of their answer.",
	"lookup_hits_total":   "Look-ups answered with more than 0 tokens.",
	"lookup_tokens_total": "Prompt tokens of all look-ups: asked for, and found (the engine's own included).",
	"lookup_faults_total": "Look-ups that were malformed; answers that could not be sent; connections that were " +
		"closed: not ZMTP, beyond a limit, stalled, or too many.",

	"leases":           "Leases that are open.",
	"lease_bytes":      "Bytes pinned by leases.",
	"leases_total":     "Leases given, revoked under pressure, and named by a release or load but not open.",
	"loads_held_total": "Loads that waited for blocks of lower tiers, and of those that did not get all in time.",

	"blocks_total":         "Blocks of finished jobs, each of one shard, by operation and status.",
	"transfer_bytes_total": "Bytes moved between engines and the pool.",
	"sampled_blocks_total": "Blocks chosen for an end-to-end check: matched, mismatched (the engine has other bytes " +
		"than the pool, should be 0), unverified (not summed in time, or the engine died or gave the block up).",

	"pool_capacity_bytes": "Bytes of the pool.",
	"pool_used_bytes":     "Bytes of used slots.",
	"pool_pinned_bytes":   "Bytes of pinned slots.",
	"pool_entries":        "Blocks stored whole, with all their shards.",
	"pool_evicted_total":  "Blocks evicted.",
	"pool_dropped_total":  "Blocks dropped as corrupt or by a reset.",
	"pool_bad_pages":      "Pages of the pool that cannot be read and are not used any more.",
	"pool_file_faults_total": "Times the pool's file could not grow (full), or a page of it beside the blocks could " +
		"not be touched (page).",
	"pool_file_abandoned":     "1: the pool began empty in a new file; a process that does not end has the old one.",
	"pool_budget_total":       "Blocks evicted, and reservations refused, because of an owner's budget.",
	"pool_owner_bytes":        "Bytes of the blocks in the pool that belong to an owner (an engine).",
	"pool_owner_budget_bytes": "Bytes that the blocks of an owner may have; 0: any number.",

	"hints_total": "Hints: requests whose end was told, and actions by what became of them.",
	"hint_blocks_total": "Blocks of hints' actions that are over: used in time, or, of those demoted, not (helped); " +
		"the others (in_vain); dropped; hits that, about, would not have been without a wish (saved).",
	"hint_bytes": "Bytes of blocks that hints pin, and retain.",

	"eviction_lookups_total": "Blocks that were looked up.",
	"eviction_hits_total":    "Blocks looked up that were stored.",
	"eviction_refused_total": "Blocks that were not stored because they are worth less than all that is.",

	"mover_running":      "1: the process runs.",
	"mover_failing":      "1: the process was lost several times in a row.",
	"mover_starts_total": "Starts of the process.",
	"mover_lost_total":   "Processes that were lost, by reason.",

	"gpu_pool_pinned_bytes":  "Bytes of the pool that are pinned for the GPU.",
	"gpu_pool_refused_bytes": "Bytes of the pool that the driver does not pin: their copies are slower.",
	"gpu_ring_bytes_total": "Bytes copied through the small pinned ring, because their place in the pool was not " +
		"pinned.",
	"gpu_memory_free_bytes": "Bytes of the GPU's memory that are free.",
	"gpu_memory_bytes":      "Bytes of the GPU's memory.",
	"gpu_imports":           "Allocations, pieces and events of engines that are open.",

	"pace_rate_bytes_per_second": "Rate that copies that can wait may take now; 0: any.",
	"pace_slowdown_ratio":        "Decode steps beside such copies, in steps without, as last compared; 0: never.",
	"pace_steps_total": "Decode steps that engines reported: beside no copies, beside such that can wait, or other " +
		"(not compared).",
	"pace_changes_total":      "Cuts and raises of the rate, and pauses to measure decode steps without copies.",
	"pace_wait_seconds_total": "Time that saves, and writes to tiers, waited for the budget.",

	"events_bytes":                "Memory that is taken for KV events, about.",
	"events_blocks_refused_total": "Blocks whose tokens were not kept for KV events: a limit, or not a block's number.",
	"events_gaps_total":           "Inventories told because a session was too far behind to be told the changes.",
	"events_file_errors_total":    "Failures of the files of tokens of KV events.",

	"tier_up":                   "1 while the tier is used, 0 while its breaker is open.",
	"tier_store_state":          "1 for the state that the store reports.",
	"tier_store_events_total":   "The store's own counters, by event.",
	"tier_used_bytes":           "Bytes that the store reports to hold.",
	"tier_capacity_bytes":       "Bytes the store can hold; 0: not known.",
	"tier_breaker_opened_total": "Times the store failed so often that its breaker opened.",
	"tier_queue":                "Blocks waiting to be fetched, or written.",
	"tier_fetched_blocks_total": "Blocks fetched, and those whose fetch failed or was incomplete.",
	"tier_bytes_total":          "Bytes fetched (in) and written (out).",
	"tier_corrupt_total":        "Shards that did not verify; they are deleted.",
	"tier_failures_total":       "Calls that exceeded their time limit, or failed otherwise.",
	"tier_puts_total": "Blocks written, stored there already, refused as the store is full, lost by a failed call, " +
		"or dropped because the queue was full or memory no longer held them.",
	"tier_asked_blocks_total": "Blocks that look-ups asked for, and of those the tier had.",
	"tier_asks_lost_total": "Look-ups whose deadline passed before the answer; questions that failed; blocks not " +
		"asked for because the queue was full.",
	"tier_reset_marker_failures_total": "Rounds in which markers of resets could not be read or written.",
	"tier_seconds":                     "Seconds of a fetch, a write and a question, moving averages.",
	"promises":                         "Blocks being fetched to memory from lower tiers.",
	"promise_bytes":                    "Bytes of them.",
	"promises_total": "Blocks promised to be fetched to memory, fulfilled, and failed; of the failed, cancelled (no " +
		"longer wanted) and expired (not there by their deadlines).",

	"transfers": "Transfers between engines that are open, or complete.",
	"transfers_total": "What became of transfers: opened, completed, delivered, expired (not delivered in time), " +
		"abandoned (open when their session ended), refused (too many).",
	"peer_fetches_total":         "Fetches from other agents: started, of those failed or cancelled; refused.",
	"peer_fetches_ended_total":   "Fetches from other agents, by how they ended.",
	"peer_blocks_failed_total":   "Blocks of fetches that were not stored, by reason; had: they were here already.",
	"peer_blocks_total":          "Blocks fetched from other agents (in), and sent to them (out, each shard counted).",
	"peer_bytes_total":           "Bytes of them.",
	"peer_seconds_total":         "Seconds of the fetches together (in), and of sending (out).",
	"peer_connections":           "Connections of other agents.",
	"peer_unauthenticated_total": "Connections to the peer listener that did not authenticate in time.",
	"peer_reads_up":              "1 if other agents' memory can be read by one-sided reads (--peer-rdma), else 0.",
	"peer_reads_failed_total":    "One-sided reads that failed: their blocks came in frames.",
}

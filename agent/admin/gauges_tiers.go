package admin

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvagent/kvagent/pool"
)

// tierSeries are the series of each tier. pool.TierStatus documents what they count.
var tierSeries = []struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	get  func(*pool.TierStatus) float64
}{
	{tierDesc("up", "1 while the tier is used, 0 while its breaker is open."), prometheus.GaugeValue,
		func(t *pool.TierStatus) float64 { return oneIf(t.State == "up" || t.State == "full") }},
	{tierDesc("full", "1 while nothing is written because the store reports that it is full."), prometheus.GaugeValue,
		func(t *pool.TierStatus) float64 { return oneIf(t.State == "full") }},
	{tierDesc("used_bytes", "Bytes that the store reports to hold."), prometheus.GaugeValue,
		func(t *pool.TierStatus) float64 { return float64(t.Usage.Bytes) }},
	{tierDesc("capacity_bytes", "Bytes the store can hold; 0: not known."), prometheus.GaugeValue,
		func(t *pool.TierStatus) float64 { return float64(t.Usage.Capacity) }},
	{tierDesc("items", "Shards the store holds."), prometheus.GaugeValue,
		func(t *pool.TierStatus) float64 { return float64(t.Usage.Items) }},
	{tierDesc("breaker_opened_total", "Times the store failed so often that its breaker opened."),
		prometheus.CounterValue, func(t *pool.TierStatus) float64 { return float64(t.Opened) }},
	{tierDesc("breaker_tries_total", "Calls that tested whether the store works again."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.Tries) }},
	{tierDesc("queue_fetch", "Blocks waiting to be fetched."), prometheus.GaugeValue,
		func(t *pool.TierStatus) float64 { return float64(t.Fetching + t.Hinted) }},
	{tierDesc("queue_put", "Blocks waiting to be written."), prometheus.GaugeValue,
		func(t *pool.TierStatus) float64 { return float64(t.Putting) }},
	{tierDesc("queue_delete", "Shards waiting to be deleted."), prometheus.GaugeValue,
		func(t *pool.TierStatus) float64 { return float64(t.Deleting) }},
	{tierDesc("hits_total", "Blocks fetched."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.Hits) }},
	{tierDesc("misses_total", "Blocks whose fetch failed or was incomplete."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.Misses) }},
	{tierDesc("bytes_in_total", "Bytes fetched."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.BytesIn) }},
	{tierDesc("bytes_out_total", "Bytes written."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.BytesOut) }},
	{tierDesc("corrupt_total", "Shards that did not verify; they are deleted."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.Corrupt) }},
	{tierDesc("timeouts_total", "Calls that exceeded their time limit."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.Timeouts) }},
	{tierDesc("errors_total", "Calls that failed otherwise."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.Errors) }},
	{tierDesc("puts_stored_total", "Blocks written."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.Stored) }},
	{tierDesc("puts_had_total", "Blocks that were stored already."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.Had) }},
	{tierDesc("puts_full_total", "Blocks refused because the store is full."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.Full) }},
	{tierDesc("puts_failed_total", "Blocks not written because a call failed."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.Lost) }},
	{tierDesc("puts_dropped_total", "Blocks not written because the queue was full, or memory no longer held them."),
		prometheus.CounterValue, func(t *pool.TierStatus) float64 { return float64(t.Dropped) }},
	{tierDesc("deleted_total", "Shards deleted."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.Deleted) }},
	{tierDesc("deletes_failed_total", "Shards not deleted because a call failed or the queue was full."),
		prometheus.CounterValue, func(t *pool.TierStatus) float64 { return float64(t.DeletesLost) }},
	{tierDesc("asked_total", "Blocks that look-ups asked for."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.Asked) }},
	{tierDesc("found_total", "Blocks that look-ups asked for and the tier had."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.Found) }},
	{tierDesc("asks_late_total", "Look-ups whose deadline passed before the tier's answer."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.AskLate) }},
	{tierDesc("asks_failed_total", "Existence queries that failed."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.AskFailed) }},
	{tierDesc("asks_refused_total", "Existence queries dropped because the queue was full."), prometheus.CounterValue,
		func(t *pool.TierStatus) float64 { return float64(t.AskRefused) }},
	{
		tierDesc("reset_marker_failures_total", "Rounds in which markers of resets could not be read or written."),
		prometheus.CounterValue, func(t *pool.TierStatus) float64 { return float64(t.MarkFails) },
	},
	{tierDesc("fetch_bytes_per_second", "Bytes a second of a fetch, moving average."), prometheus.GaugeValue,
		func(t *pool.TierStatus) float64 { return t.Rate }},
	{tierDesc("fetch_seconds", "Seconds of a fetch, moving average."), prometheus.GaugeValue,
		func(t *pool.TierStatus) float64 { return t.FetchSeconds }},
	{tierDesc("put_seconds", "Seconds of a write, moving average."), prometheus.GaugeValue,
		func(t *pool.TierStatus) float64 { return t.PutSeconds }},
	{tierDesc("ask_seconds", "Seconds of an existence query, moving average."), prometheus.GaugeValue,
		func(t *pool.TierStatus) float64 { return t.AskSeconds }},
}

var (
	tierStateDesc = prometheus.NewDesc("kvagent_tier_store_state", "1 for the state that the store reports.",
		[]string{"tier", "state"}, nil)
	tierEventDesc = prometheus.NewDesc("kvagent_tier_store_events_total", "The store's own counters, by event.",
		[]string{"tier", "event"}, nil)
)

// collectStore collects the report of a tier's store.
func collectStore(ch chan<- prometheus.Metric, t *pool.TierStatus) {
	if t.Store.State == "" {
		return
	}
	ch <- prometheus.MustNewConstMetric(tierStateDesc, prometheus.GaugeValue, 1, t.Name, t.Store.State)
	for _, c := range t.Store.Counts {
		ch <- prometheus.MustNewConstMetric(tierEventDesc, prometheus.CounterValue, float64(c.N), t.Name, c.Name)
	}
}

func tierDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("kvagent_tier_"+name, help, []string{"tier"}, nil)
}

var (
	promisesDesc     = desc("kvagent_promises", "Blocks being fetched to memory from lower tiers.")
	promiseBytesDesc = desc("kvagent_promise_bytes", "Bytes of them.")
	promiseCapDesc   = desc("kvagent_promise_cap_bytes", "The prefetch budget.")
	promisedDesc     = desc("kvagent_promises_made_total", "Blocks promised to be fetched to memory.")
	fulfilledDesc    = desc("kvagent_promises_fulfilled_total", "Of those, blocks that arrived.")
	failedDesc       = desc("kvagent_promises_failed_total",
		"Of those, blocks that did not arrive, cancelled ones included.")
	cancelledDesc = desc("kvagent_promises_cancelled_total", "Of those, blocks that were no longer wanted.")
	expiredDesc   = desc("kvagent_promises_expired_total",
		"Of those, blocks that had not arrived by their deadlines.")
	adoptedDesc = desc("kvagent_resets_adopted_total", "Resets of other nodes that were adopted.")
	againDesc   = desc("kvagent_resets_repeated_total",
		"Resets that collided with another node's and were repeated.")
)

func describeTiers(ch chan<- *prometheus.Desc) {
	for _, s := range tierSeries {
		ch <- s.desc
	}
	for _, d := range []*prometheus.Desc{
		tierStateDesc, tierEventDesc, promisesDesc, promiseBytesDesc, promiseCapDesc, promisedDesc, fulfilledDesc,
		failedDesc, cancelledDesc, expiredDesc, adoptedDesc, againDesc,
	} {
		ch <- d
	}
}

// collectTiers collects nothing without tiers.
func collectTiers(ch chan<- prometheus.Metric, r *pool.TierReport) {
	if r == nil {
		return
	}
	for i := range r.Tiers {
		for _, s := range tierSeries {
			ch <- prometheus.MustNewConstMetric(s.desc, s.kind, s.get(&r.Tiers[i]), r.Tiers[i].Name)
		}
		collectStore(ch, &r.Tiers[i])
	}
	for _, m := range []struct {
		desc *prometheus.Desc
		kind prometheus.ValueType
		v    float64
	}{
		{promisesDesc, prometheus.GaugeValue, float64(r.Promises)},
		{promiseBytesDesc, prometheus.GaugeValue, float64(r.PromiseBytes)},
		{promiseCapDesc, prometheus.GaugeValue, float64(r.PromiseCap)},
		{promisedDesc, prometheus.CounterValue, float64(r.Promised)},
		{fulfilledDesc, prometheus.CounterValue, float64(r.Fulfilled)},
		{failedDesc, prometheus.CounterValue, float64(r.Failed)},
		{cancelledDesc, prometheus.CounterValue, float64(r.Cancelled)},
		{expiredDesc, prometheus.CounterValue, float64(r.Expired)},
		{adoptedDesc, prometheus.CounterValue, float64(r.Adopted)},
		{againDesc, prometheus.CounterValue, float64(r.Again)},
	} {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.v)
	}
}

// Package report has what the agent's core tells of itself: its state, and its counters.
package report

import (
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// Metrics holds the agent's own counters. Every series exists from the start, at zero; the hot
// paths hold their counters and look up no label.
type Metrics struct {
	*prometheus.Registry

	LookupStatus map[string]*Counter `metric:"lookups_total" label:"status"`
	LookupHits   Counter             `metric:"lookup_hits_total"`
	TokensAsked  Counter             `metric:"lookup_tokens_total{tokens=asked}"`
	TokensFound  Counter             `metric:"lookup_tokens_total{tokens=found}"`
	lookupStatus [len(lookupStatusNames)]*Counter
	lookupMax    MaxDuration // of look-ups in the own form: total time
	LookupRecent MaxDuration // the same, since the page asked last
	overMax      MaxDuration // by which one of these missed its deadline
	late         prometheus.Histogram

	Saved       map[string]*Counter `metric:"blocks_total{op=save}" label:"status"`
	Loaded      map[string]*Counter `metric:"blocks_total{op=load}" label:"status"`
	SavedBytes  Counter             `metric:"transfer_bytes_total{op=save}"`
	LoadedBytes Counter             `metric:"transfer_bytes_total{op=load}"`
	saved       [blockStatuses]*Counter
	loaded      [blockStatuses]*Counter
	Samples     [2]SampleCounters // by transfer.Kind
	Stages      JobStages

	LeasesGiven   Counter `metric:"leases_total{event=given}"`
	LeasesUnknown Counter `metric:"leases_total{event=unknown}"` // a release or load named one that is not open
	LoadsHeld     Counter `metric:"loads_held_total{event=held}"`
	LoadsTimedOut Counter `metric:"loads_held_total{event=timed_out}"`

	Registrations map[string]*Counter `metric:"registrations_total" label:"result"`
	SessionEnds   map[string]*Counter `metric:"session_ends_total" label:"reason"`
	Resets        Counter             `metric:"resets_total{origin=here}"`
	CleanupMax    MaxDuration
	Cleanup       prometheus.Histogram
}

// Results of a registration. A peer that may not connect, or is one too many, is kept out before.
const (
	ResultDone    = "done"
	ResultRefused = "refused"
	ResultClash   = "clash"
	ResultKeptOut = "kept_out"
)

// StatusNames are the labels of the block statuses.
var StatusNames = map[pool.Status]string{
	pool.OK: "ok", pool.Exists: "exists", pool.InProgress: "in_progress", pool.Busy: "busy", pool.Stale: "stale",
	pool.Missing: "missing", pool.Corrupt: "corrupt", pool.Invalid: "invalid", pool.Unwanted: "unwanted",
	transfer.Revoked: "revoked", transfer.Cancelled: "cancelled", transfer.TimedOut: "timed_out",
	transfer.Failed: "failed", transfer.Off: "off",
}

// blockStatuses bounds the numbers of block statuses; those without a name count as other.
const blockStatuses = 32

var lookupStatusNames = [...]string{"hit", "pending", "off", "not_registered", "malformed", "overloaded", "no_session",
	"lease_cap", "ready"}

// LookupStatusName returns the name of a look-up's status, as metrics have it.
func LookupStatusName(s ipc.LookupStatus) string {
	if int(s) < len(lookupStatusNames) {
		return lookupStatusNames[s]
	}
	return fmt.Sprint(int(s))
}

// NewMetrics makes the counters, with the agent's labels for the reasons of session ends.
func NewMetrics(endReasons []string) *Metrics {
	m := &Metrics{
		Registry:      prometheus.NewRegistry(),
		LookupStatus:  series(lookupStatusNames[:]...),
		Registrations: series(ResultDone, ResultRefused, ResultClash, ResultKeptOut),
		SessionEnds:   series(endReasons...),
		Samples:       [2]SampleCounters{transfer.Save: {Op: "save"}, transfer.Load: {Op: "load"}},
		late: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvagent_lookup_over_deadline_seconds",
			Help: "Time by which a look-up missed its deadline, counted from when the agent read it; only late ones " +
				"are observed.",
			Buckets: []float64{.0001, .0002, .0005, .001, .002, .005, .01, .02, .05, .1, .5},
		}),
		Cleanup: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvagent_cleanup_seconds",
			Help: "Time from the end of a registered session to the close of its socket: jobs ended, regions closed, " +
				"leases dropped.",
			Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5},
		}),
	}
	for i, name := range lookupStatusNames {
		m.lookupStatus[i] = m.LookupStatus[name]
	}
	m.Saved, m.Loaded = blockSeries(&m.saved), blockSeries(&m.loaded)
	m.Registry.MustRegister(collectors.NewGoCollector(collectors.WithGoCollectorMemStatsMetricsDisabled()),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), m.late, m.Cleanup)
	m.Stages.register(m.Registry)
	return m
}

// Counter is a number that only grows. Adding is one atomic operation.
type Counter struct{ atomic.Uint64 }

// series makes a counter for each value of a label.
func series(values ...string) map[string]*Counter {
	out := make(map[string]*Counter, len(values))
	for _, value := range values {
		out[value] = &Counter{}
	}
	return out
}

// blockSeries makes the counters of one direction, and sets those of by.
func blockSeries(by *[blockStatuses]*Counter) map[string]*Counter {
	const other = "other"
	out := series(other)
	for i := range by {
		name, ok := StatusNames[pool.Status(i)]
		if !ok {
			name = other
		} else {
			out[name] = &Counter{}
		}
		by[i] = out[name]
	}
	return out
}

// CountBlocks counts the statuses of one job.
func (m *Metrics) CountBlocks(kind transfer.Kind, status []pool.Status, bytes int64) {
	by, moved := &m.saved, &m.SavedBytes
	if kind == transfer.Load {
		by, moved = &m.loaded, &m.LoadedBytes
	}
	var n [blockStatuses]int
	for _, s := range status {
		n[int(s)%len(n)]++
	}
	for i, count := range n {
		if count > 0 {
			by[i].Add(uint64(count))
		}
	}
	moved.Add(uint64(bytes))
}

// CountLookup counts one answer.
func (m *Metrics) CountLookup(status ipc.LookupStatus, asked, found uint64) {
	m.lookupStatus[int(status)%len(m.lookupStatus)].Add(1)
	m.TokensAsked.Add(asked)
	if found > 0 {
		m.LookupHits.Add(1)
		m.TokensFound.Add(found)
	}
}

// lookups returns how many look-ups were answered.
func (m *Metrics) lookups() (n uint64) {
	for _, c := range m.lookupStatus {
		n += c.Load()
	}
	return n
}

// CountTime records the time of a look-up in the own form, and reports whether it missed its
// deadline.
func (m *Metrics) CountTime(took, deadline time.Duration) (late bool) {
	m.lookupMax.Observe(took)
	m.LookupRecent.Observe(took)
	if took <= deadline {
		return false
	}
	m.overMax.Observe(took - deadline)
	m.late.Observe((took - deadline).Seconds())
	return true
}

// MaxDuration keeps the longest observed duration.
type MaxDuration struct{ atomic.Int64 }

// Observe keeps d if it is the longest.
func (m *MaxDuration) Observe(d time.Duration) {
	for {
		old := m.Load()
		if int64(d) <= old || m.CompareAndSwap(old, int64(d)) {
			return
		}
	}
}

// Take returns the longest, in µs, and forgets it.
func (m *MaxDuration) Take() float64 { return microseconds(time.Duration(m.Swap(0))) }

func (m *MaxDuration) micros() float64 { return microseconds(time.Duration(m.Load())) }

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// SampleCounters counts the blocks of one direction that were chosen for an end-to-end check.
type SampleCounters struct {
	Op         string  `label:"op"`
	Matched    Counter `metric:"sampled_blocks_total{result=matched}"`
	Mismatched Counter `metric:"sampled_blocks_total{result=mismatched}"`
	Unverified Counter `metric:"sampled_blocks_total{result=unverified}"`
}

// Add counts the blocks of one job.
func (c *SampleCounters) Add(n *transfer.SampleCounts) {
	c.Matched.Add(n.Matched)
	c.Mismatched.Add(n.Mismatched)
	c.Unverified.Add(n.Unverified)
}

func (c *SampleCounters) status() transfer.SampleCounts {
	return transfer.SampleCounts{
		Matched: c.Matched.Load(), Mismatched: c.Mismatched.Load(), Unverified: c.Unverified.Load(),
	}
}

// DirectionNames are the labels of the kinds of jobs.
var DirectionNames = [...]string{transfer.Save: "save", transfer.Load: "load"}

// stageNames are the labels of the stages of a job, in their order.
var stageNames = [...]string{"step", "queue", "copy", "sums", "report"}

// stageBuckets are 10 us to 20 s, three for each power of ten, in seconds.
var stageBuckets = func() (bounds []float64) {
	for power := -5; power <= 1; power++ {
		for _, digit := range []float64{1, 2, 5} {
			bounds = append(bounds, digit*math.Pow10(power))
		}
	}
	return bounds[:len(bounds)-1]
}()

// JobStages are histograms of the time of jobs that copied something, by direction and stage.
type JobStages struct {
	seconds [len(DirectionNames)][len(stageNames)]prometheus.Histogram
}

func (j *JobStages) register(r prometheus.Registerer) {
	for kind, direction := range DirectionNames {
		for i, stage := range stageNames {
			j.seconds[kind][i] = prometheus.NewHistogram(prometheus.HistogramOpts{
				Name: "kvagent_transfer_stage_seconds",
				Help: "Time of jobs that copied something: waiting for the engine's step, queued until the first " +
					"copy, first to last byte, until the sums were made, until reported.",
				ConstLabels: prometheus.Labels{"direction": direction, "stage": stage}, Buckets: stageBuckets,
			})
			r.MustRegister(j.seconds[kind][i])
		}
	}
}

// Observe records the times of one job. It allocates nothing.
func (j *JobStages) Observe(kind transfer.Kind, t *transfer.Times) {
	if !t.Copied {
		return
	}
	for i, d := range [len(stageNames)]time.Duration{t.Step, t.Queue, t.Copy, t.Sums, t.Report} {
		j.seconds[kind][i].Observe(d.Seconds())
	}
}

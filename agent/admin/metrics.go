package admin

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// Metrics holds the agent's counters. Every series exists from the start, at zero; the hot paths
// hold their counters and look up no label.
type Metrics struct {
	registry *prometheus.Registry

	lookups, lookupHits        *Counter
	tokensAsked, tokensFound   *Counter
	lookupStatus               [9]*Counter
	lookupForm                 [8]*Counter
	saved, loaded              [32]*Counter // by block status
	savedBytes, loadedBytes    *Counter
	Samples                    [2]SampleCounters // by transfer.Kind
	Stages                     JobStages
	LoadsHeld, LoadsTimedOut   *Counter
	LeasesGiven, LeasesUnknown *Counter // unknown: a release or load named a lease that is not open
	Registrations              map[string]*Counter
	SessionEnds                map[string]*Counter
	Malformed                  map[string]*Counter
	lookupMax, AskMax          MaxDuration // of look-ups in the own form: total time, and wait for shared tiers
	worstLate                  worstLate   // the look-up that missed its deadline by most
	late                       prometheus.Histogram
	Resets, SessionsRefused    *Counter
	TransfersIgnored           *Counter // messages about transfers, of sessions without a space
	KeepsIgnored               *Counter // KEEPs of sessions without a space
	CleanupMax                 MaxDuration
	Cleanup                    prometheus.Histogram
	Panics                     map[string]*Counter // by place
}

// Results of a registration.
const (
	ResultDone    = "done"
	ResultRefused = "refused"
	ResultClash   = "clash"
)

// StatusNames are the labels of the block statuses.
var StatusNames = map[pool.Status]string{
	pool.OK: "ok", pool.Exists: "exists", pool.InProgress: "in_progress", pool.Busy: "busy", pool.Stale: "stale",
	pool.Missing: "missing", pool.Corrupt: "corrupt", pool.Invalid: "invalid", transfer.Revoked: "revoked",
	transfer.Cancelled: "cancelled", transfer.TimedOut: "timed_out", transfer.Failed: "failed", transfer.Off: "off",
}

var lookupStatusNames = [9]string{"hit", "pending", "off", "not_registered", "malformed", "overloaded", "no_session",
	"lease_cap", "ready"}

var formNames = [8]string{"malformed", "own", "upstream", "reset", "ascend2", "ascend3", "ascend4", "simple"}

// NewMetrics makes the counters, with the agent's labels for the reasons of session ends and the
// places of panics.
func NewMetrics(endReasons, panicPlaces []string) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry()}
	m.registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.makeLookups()
	m.makeBlocks()
	m.makeSamples()
	m.Stages.register(m.registry)
	m.makeSessions(endReasons, panicPlaces)
	return m
}

// Counter is a number that only grows. Adding is one atomic operation.
type Counter struct{ atomic.Uint64 }

// counter makes a series; labels are pairs of name and value.
func (m *Metrics) counter(name, help string, labels ...string) *Counter {
	c := &Counter{}
	opts := prometheus.CounterOpts{Name: name, Help: help, ConstLabels: prometheus.Labels{}}
	for i := 0; i+1 < len(labels); i += 2 {
		opts.ConstLabels[labels[i]] = labels[i+1]
	}
	m.registry.MustRegister(prometheus.NewCounterFunc(opts, func() float64 { return float64(c.Load()) }))
	return c
}

// series makes one counter for each value of a label.
func (m *Metrics) series(name, help, label string, values ...string) map[string]*Counter {
	out := make(map[string]*Counter, len(values))
	for _, value := range values {
		out[value] = m.counter(name, help, label, value)
	}
	return out
}

func (m *Metrics) makeLookups() {
	m.lookups = m.counter("kvagent_lookups_total", "Look-ups answered, all forms and statuses.")
	m.lookupHits = m.counter("kvagent_lookup_hits_total", "Look-ups answered with more than 0 tokens.")
	m.tokensAsked = m.counter("kvagent_lookup_tokens_asked_total", "Prompt tokens of all look-ups.")
	m.tokensFound = m.counter("kvagent_lookup_tokens_found_total",
		"Tokens reported to look-ups, the engine's own included.")
	for i, name := range lookupStatusNames {
		m.lookupStatus[i] = m.counter("kvagent_lookup_status_total", "Look-ups by the status of their answer.",
			"status", name)
	}
	m.late = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "kvagent_lookup_over_deadline_seconds",
		Help: "Time by which a look-up missed its deadline, counted from when the agent read it; only late ones " +
			"are observed.",
		Buckets: []float64{.0001, .0002, .0005, .001, .002, .005, .01, .02, .05, .1, .5},
	})
	m.registry.MustRegister(m.late)
	for i, name := range formNames {
		m.lookupForm[i] = m.counter("kvagent_lookup_form_total", "Look-ups by the form of the request.", "form", name)
	}
}

func (m *Metrics) makeBlocks() {
	other := m.counter("kvagent_blocks_other_total", "Blocks with a status not named here; should be 0.")
	const help = "Blocks of finished jobs, each of one shard, by operation and status."
	for i := range m.saved {
		m.saved[i], m.loaded[i] = other, other
		if name, ok := StatusNames[pool.Status(i)]; ok {
			m.saved[i] = m.counter("kvagent_blocks_total", help, "op", "save", "status", name)
			m.loaded[i] = m.counter("kvagent_blocks_total", help, "op", "load", "status", name)
		}
	}
	const moved = "Bytes moved between engines and the pool."
	m.savedBytes = m.counter("kvagent_transfer_bytes_total", moved, "op", "save")
	m.loadedBytes = m.counter("kvagent_transfer_bytes_total", moved, "op", "load")
}

func (m *Metrics) makeSessions(endReasons, panicPlaces []string) {
	m.LeasesGiven = m.counter("kvagent_leases_given_total", "Leases given by look-ups.")
	m.LeasesUnknown = m.counter("kvagent_leases_unknown_total",
		"Leases named by a release or a load that were not open: revoked, ended, or never given.")
	m.LoadsHeld = m.counter("kvagent_loads_held_total", "Loads that waited for blocks being fetched from lower tiers.")
	m.LoadsTimedOut = m.counter("kvagent_loads_held_timeout_total",
		"Of those, loads that continued before all blocks had arrived or failed, because they reached a job's "+
			"longest wait.")
	m.Registrations = m.series("kvagent_registrations_total", "Registrations by result.", "result", ResultDone,
		ResultRefused, ResultClash)
	m.SessionEnds = m.series("kvagent_session_ends_total", "Session sockets that ended, by reason.", "reason",
		endReasons...)
	m.Malformed = m.series("kvagent_session_malformed_total",
		"Sessions ended because of a malformed message, by reason.", "reason", malformedReasons()...)
	m.SessionsRefused = m.counter("kvagent_sessions_refused_total",
		"Peers refused: not allowed to connect, or over the limit.")
	m.Panics = m.series("kvagent_session_panics_total",
		"Panics that ended the session they occurred in, by place.", "where", panicPlaces...)
	m.TransfersIgnored = m.counter("kvagent_transfers_ignored_total",
		"Messages about transfers that were ignored: their session had no registration, or its space was not open.")
	m.KeepsIgnored = m.counter("kvagent_keeps_ignored_total",
		"Requests to keep or drop blocks that were ignored: their session had no registration, or its space was "+
			"not open.")
	m.Resets = m.counter("kvagent_resets_total", "New weights epochs.")
	m.Cleanup = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "kvagent_cleanup_seconds",
		Help: "Time from the end of a registered session to the close of its socket: jobs ended, regions closed, " +
			"leases dropped.",
		Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5},
	})
	m.registry.MustRegister(m.Cleanup, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "kvagent_cleanup_max_seconds", Help: "Longest time from the end of a session to the close of its socket.",
	}, func() float64 { return float64(m.CleanupMax.Load()) / 1e9 }))
}

// malformedReasons returns the reasons of package ipc.
func malformedReasons() []string {
	names := make([]string, ipc.Reasons)
	for i := range names {
		names[i] = ipc.Reason(i).String()
	}
	return names
}

// CountBlocks counts the statuses of one job.
func (m *Metrics) CountBlocks(kind transfer.Kind, status []pool.Status, bytes int64) {
	by, moved := &m.saved, m.savedBytes
	if kind == transfer.Load {
		by, moved = &m.loaded, m.loadedBytes
	}
	var n [len(m.saved)]int
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
func (m *Metrics) CountLookup(form ipc.Form, status ipc.LookupStatus, asked, found uint64) {
	m.lookups.Add(1)
	m.lookupForm[int(form)%len(m.lookupForm)].Add(1)
	m.lookupStatus[int(status)%len(m.lookupStatus)].Add(1)
	m.tokensAsked.Add(asked)
	if found > 0 {
		m.lookupHits.Add(1)
		m.tokensFound.Add(found)
	}
}

// CountTime records the time of a look-up in the own form, and reports whether it missed its
// deadline.
func (m *Metrics) CountTime(took, deadline time.Duration) (late bool) {
	m.lookupMax.Observe(took)
	if took <= deadline {
		return false
	}
	m.worstLate.show(lateLookup{read: time.Now().Add(-took), took: took, over: took - deadline})
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

func (m *MaxDuration) micros() float64 { return microseconds(time.Duration(m.Load())) }

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// lateLookup is a look-up that was answered after its deadline.
type lateLookup struct {
	read       time.Time
	took, over time.Duration
}

// worstLate keeps the look-up that missed its deadline by most, and when, so that it can be
// compared with what the machine did at the time.
type worstLate struct {
	mu  sync.Mutex
	one lateLookup
}

func (l *worstLate) show(one lateLookup) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one.over > l.one.over {
		l.one = one
	}
}

func (l *worstLate) get() lateLookup {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.one
}

// SampleCounters counts the blocks of one direction that were chosen for an end-to-end check.
type SampleCounters struct{ matched, mismatched, unverified *Counter }

// Add counts the blocks of one job.
func (c *SampleCounters) Add(n *transfer.SampleCounts) {
	c.matched.Add(n.Matched)
	c.mismatched.Add(n.Mismatched)
	c.unverified.Add(n.Unverified)
}

func (m *Metrics) makeSamples() {
	const help = "Blocks chosen for an end-to-end check, by direction and result: matched, mismatched " +
		"(the engine has other bytes than the pool, should be 0), unverified (not summed in time, or the engine died " +
		"or gave the block up)."
	for kind, op := range [...]string{transfer.Save: "save", transfer.Load: "load"} {
		c := &m.Samples[kind]
		c.matched = m.counter("kvagent_sampled_blocks_total", help, "op", op, "result", "matched")
		c.mismatched = m.counter("kvagent_sampled_blocks_total", help, "op", op, "result", "mismatched")
		c.unverified = m.counter("kvagent_sampled_blocks_total", help, "op", op, "result", "unverified")
	}
}

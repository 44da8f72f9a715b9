package agent

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// metrics are the counters for machines. Every series is there from the start, at zero; the hot paths hold their
// counters and look no label up.
type metrics struct {
	registry *prometheus.Registry

	lookups, lookupHits       *counter
	tokensAsked, tokensFound  *counter
	lookupStatus              [8]*counter
	lookupForm                [8]*counter
	saved, loaded             [32]*counter // by block status
	savedBytes, loadedBytes   *counter
	samples                   [2]sampleCounters // by transfer.Kind
	loadsHeld, loadsUnsettled *counter
	leasesGiven, leasesPassed *counter // passed: a release or load named a lease that is not open
	registrations             map[string]*counter
	sessionEnds               map[string]*counter
	malformed                 map[string]*counter
	lookupMax, askMax         maxDuration // of look-ups in the own form: all of one, and its wait for shared tiers
	latest                    latest      // the one farthest beyond its deadline
	late                      prometheus.Histogram
	resets, sessionsRefused   *counter
	cleanupMax                maxDuration
	cleanup                   prometheus.Histogram
	panics                    map[string]*counter // by place
}

// Results of a registration.
const (
	resultDone    = "done"
	resultRefused = "refused"
	resultClash   = "clash"
)

// statusNames are the block statuses as labels say them.
var statusNames = map[pool.Status]string{
	pool.OK: "ok", pool.Exists: "exists", pool.InProgress: "in_progress", pool.Busy: "busy", pool.Stale: "stale",
	pool.Missing: "missing", pool.Corrupt: "corrupt", pool.Invalid: "invalid", transfer.Revoked: "revoked",
	transfer.Cancelled: "cancelled", transfer.TimedOut: "timed_out", transfer.Failed: "failed", transfer.Off: "off",
}

var lookupStatusNames = [8]string{"hit", "pending", "off", "not_registered", "malformed", "overloaded", "no_session", "lease_cap"}

var formNames = [8]string{"malformed", "own", "upstream", "reset", "ascend2", "ascend3", "ascend4", "simple"}

func newMetrics() *metrics {
	m := &metrics{registry: prometheus.NewRegistry()}
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.makeLookups()
	m.makeBlocks()
	m.makeSamples()
	m.makeSessions()
	return m
}

// counter is a number that only grows. Prometheus and the status page read it; adding is one atomic operation.
type counter struct{ atomic.Uint64 }

// counter makes a series; labels are pairs of name and value.
func (m *metrics) counter(name, help string, labels ...string) *counter {
	c := &counter{}
	opts := prometheus.CounterOpts{Name: name, Help: help, ConstLabels: prometheus.Labels{}}
	for i := 0; i+1 < len(labels); i += 2 {
		opts.ConstLabels[labels[i]] = labels[i+1]
	}
	m.registry.MustRegister(prometheus.NewCounterFunc(opts, func() float64 { return float64(c.Load()) }))
	return c
}

// series makes one counter for each value of a label.
func (m *metrics) series(name, help, label string, values ...string) map[string]*counter {
	out := make(map[string]*counter, len(values))
	for _, value := range values {
		out[value] = m.counter(name, help, label, value)
	}
	return out
}

func (m *metrics) makeLookups() {
	m.lookups = m.counter("kvagent_lookups_total", "Look-ups answered, all forms and statuses.")
	m.lookupHits = m.counter("kvagent_lookup_hits_total", "Look-ups answered with more than 0 tokens.")
	m.tokensAsked = m.counter("kvagent_lookup_tokens_asked_total", "Prompt tokens of all look-ups.")
	m.tokensFound = m.counter("kvagent_lookup_tokens_found_total", "Tokens answered to look-ups, the engine's own included.")
	for i, name := range lookupStatusNames {
		m.lookupStatus[i] = m.counter("kvagent_lookup_status_total", "Look-ups by the status of their answer.", "status", name)
	}
	m.late = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "kvagent_lookup_over_deadline_seconds",
		Help:    "How far beyond its deadline a look-up was answered, from when the agent read it; its count is that of the late ones.",
		Buckets: []float64{.0001, .0002, .0005, .001, .002, .005, .01, .02, .05, .1, .5},
	})
	m.registry.MustRegister(m.late)
	for i, name := range formNames {
		m.lookupForm[i] = m.counter("kvagent_lookup_form_total", "Look-ups by the form of the request.", "form", name)
	}
}

func (m *metrics) makeBlocks() {
	other := m.counter("kvagent_blocks_other_total", "Blocks with a status not named here; should be 0.")
	const help = "Blocks of finished jobs, each of one shard, by what was asked and what became of them."
	for i := range m.saved {
		m.saved[i], m.loaded[i] = other, other
		if name, ok := statusNames[pool.Status(i)]; ok {
			m.saved[i] = m.counter("kvagent_blocks_total", help, "op", "save", "status", name)
			m.loaded[i] = m.counter("kvagent_blocks_total", help, "op", "load", "status", name)
		}
	}
	const moved = "Bytes moved between engines and the pool."
	m.savedBytes = m.counter("kvagent_transfer_bytes_total", moved, "op", "save")
	m.loadedBytes = m.counter("kvagent_transfer_bytes_total", moved, "op", "load")
}

func (m *metrics) makeSessions() {
	m.leasesGiven = m.counter("kvagent_leases_given_total", "Leases given by look-ups.")
	m.leasesPassed = m.counter("kvagent_leases_unknown_total", "Leases named by a release or a load that were not open: revoked, ended, or never given.")
	m.loadsHeld = m.counter("kvagent_loads_held_total", "Loads that waited for blocks being brought up from lower tiers.")
	m.loadsUnsettled = m.counter("kvagent_loads_unsettled_total", "Of those, loads that went on before all had come or failed, because they had waited as long as a job may.")
	m.registrations = m.series("kvagent_registrations_total", "Registrations by result.", "result", resultDone, resultRefused, resultClash)
	m.sessionEnds = m.series("kvagent_session_ends_total", "Session sockets that ended, by reason.", "reason", endReasons[:]...)
	m.malformed = m.series("kvagent_session_malformed_total", "Sessions ended because of a malformed message, by reason.", "reason", malformedReasons()...)
	m.sessionsRefused = m.counter("kvagent_sessions_refused_total", "Peers that may not connect, or were too many.")
	m.panics = m.series("kvagent_session_panics_total",
		"Defects of the agent that ended the session they were met for, by where.", "where", panicPlaces[:]...)
	m.resets = m.counter("kvagent_resets_total", "New weights epochs.")
	m.cleanup = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "kvagent_cleanup_seconds",
		Help:    "Time from the end of a registered session to the close of its socket: jobs ended, regions closed, leases dropped.",
		Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5},
	})
	m.registry.MustRegister(m.cleanup)
}

// malformedReasons are the reasons package ipc knows.
func malformedReasons() []string {
	names := make([]string, ipc.Reasons)
	for i := range names {
		names[i] = ipc.Reason(i).String()
	}
	return names
}

// countBlocks counts the statuses of one job.
func (m *metrics) countBlocks(kind transfer.Kind, status []pool.Status, bytes int64) {
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

// countLookup counts one answer.
func (m *metrics) countLookup(form ipc.Form, status ipc.LookupStatus, asked, found uint64) {
	m.lookups.Add(1)
	m.lookupForm[int(form)%len(m.lookupForm)].Add(1)
	m.lookupStatus[int(status)%len(m.lookupStatus)].Add(1)
	m.tokensAsked.Add(asked)
	if found > 0 {
		m.lookupHits.Add(1)
		m.tokensFound.Add(found)
	}
}

// countTime notes what a look-up in the own form took, and says whether that is beyond its deadline.
func (m *metrics) countTime(took, deadline time.Duration) (late bool) {
	m.lookupMax.show(took)
	if took <= deadline {
		return false
	}
	m.latest.show(lateLookup{read: time.Now().Add(-took), took: took, over: took - deadline})
	m.late.Observe((took - deadline).Seconds())
	return true
}

// maxDuration keeps the longest of what it was shown.
type maxDuration struct{ atomic.Int64 }

func (m *maxDuration) show(d time.Duration) {
	for {
		old := m.Load()
		if int64(d) <= old || m.CompareAndSwap(old, int64(d)) {
			return
		}
	}
}

func (m *maxDuration) micros() float64 { return microseconds(time.Duration(m.Load())) }

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

package agent

import "github.com/prometheus/client_golang/prometheus"

// LeftBehind is what the agents before this one left in its directory.
type LeftBehind struct {
	Ended uint64 `json:"ended"` // movers that this agent ended, or that ended while it watched
	PIDs  []int  `json:"pids"`  // movers that cannot be ended: each keeps the memory of the engines that it served
	Cold  string `json:"cold"`  // why the pool's file was given up, and the pool started empty; empty: it was not
}

func (a *Agent) leftBehind() LeftBehind {
	if a.cfg.LeftBehind == nil {
		return LeftBehind{PIDs: []int{}}
	}
	return a.cfg.LeftBehind()
}

var leftSeries = []struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	get  func(*LeftBehind) float64
}{
	{desc("kvagent_left_behind_processes",
		"Movers of an agent before this one that cannot be ended: each keeps its engines' memory."), prometheus.GaugeValue, func(l *LeftBehind) float64 { return float64(len(l.PIDs)) }},
	{desc("kvagent_left_behind_ended_total", "Movers of an agent before this one that were ended."),
		prometheus.CounterValue, func(l *LeftBehind) float64 { return float64(l.Ended) }},
	{desc("kvagent_pool_file_given_up",
		"1: a process that cannot be ended holds the pool's file; the pool started empty in a new one."), prometheus.GaugeValue, func(l *LeftBehind) float64 { return oneIf(l.Cold != "") }},
}

func describeLeft(ch chan<- *prometheus.Desc) {
	for _, s := range leftSeries {
		ch <- s.desc
	}
}

func collectLeft(ch chan<- prometheus.Metric, l LeftBehind) {
	for _, s := range leftSeries {
		ch <- prometheus.MustNewConstMetric(s.desc, s.kind, s.get(&l))
	}
}

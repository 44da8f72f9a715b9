package admin

import (
	"encoding/json"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvagent/kvagent/cudaipc"
)

// gpuInfo returns the last report of a mover's device about its GPU; ok is false for a host device,
// and for a report that cannot be read.
func gpuInfo(m *cudaipc.MoverState) (i cudaipc.CUDAInfo, ok bool) {
	if m.Device != cudaipc.CUDADevice {
		return i, false
	}
	return i, len(m.Info) == 0 || json.Unmarshal(m.Info, &i) == nil // all zero before the first report
}

// gpuSeries are read of each mover that has a GPU; the label is the mover's name, which is the
// GPU's.
var gpuSeries = []struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	get  func(*cudaipc.CUDAInfo) float64
}{
	{gpuDesc("pool_pinned_bytes", "Bytes of the pool that are pinned for the GPU."), prometheus.GaugeValue,
		func(i *cudaipc.CUDAInfo) float64 { return float64(i.Pinned) }},
	{gpuDesc("pool_refused_bytes", "Bytes of the pool that the driver does not pin: their copies are slower."),
		prometheus.GaugeValue, func(i *cudaipc.CUDAInfo) float64 { return float64(i.Refused) }},
	{gpuDesc("pool_waiting_bytes", "Bytes of the pool that are not pinned yet."), prometheus.GaugeValue,
		func(i *cudaipc.CUDAInfo) float64 { return float64(i.Arena - i.Pinned - i.Refused) }},
	{gpuDesc("ring_bytes_total",
		"Bytes copied through the small pinned ring, because their place in the pool was not pinned."),
		prometheus.CounterValue, func(i *cudaipc.CUDAInfo) float64 { return float64(i.RingBytes) }},
	{gpuDesc("memory_free_bytes", "Bytes of the GPU's memory that are free."), prometheus.GaugeValue,
		func(i *cudaipc.CUDAInfo) float64 { return float64(i.Free) }},
	{gpuDesc("memory_bytes", "Bytes of the GPU's memory."), prometheus.GaugeValue,
		func(i *cudaipc.CUDAInfo) float64 { return float64(i.Total) }},
	{gpuDesc("imports", "Allocations, pieces and events of engines that are open."), prometheus.GaugeValue,
		func(i *cudaipc.CUDAInfo) float64 { return float64(i.Imports) }},
}

func gpuDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("kvagent_gpu_"+name, help, []string{"mover"}, nil)
}

func collectGPU(ch chan<- prometheus.Metric, m *cudaipc.MoverState) {
	i, ok := gpuInfo(m)
	if !ok {
		return
	}
	for _, s := range gpuSeries {
		ch <- prometheus.MustNewConstMetric(s.desc, s.kind, s.get(&i), m.Name)
	}
}

// moverSeries are read of each mover; the label is its name.
var moverSeries = []struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	get  func(*cudaipc.MoverState) float64
}{
	{moverDesc("running", "1: the process runs."), prometheus.GaugeValue,
		func(m *cudaipc.MoverState) float64 { return oneIf(m.Pid != 0) }},
	{moverDesc("failing", "1: the process was lost several times in a row."), prometheus.GaugeValue,
		func(m *cudaipc.MoverState) float64 { return oneIf(m.Failing) }},
	{moverDesc("peers", "Workers whose memory is open in the process."), prometheus.GaugeValue,
		func(m *cudaipc.MoverState) float64 { return float64(m.Peers) }},
	{moverDesc("copies", "Copies in flight."), prometheus.GaugeValue,
		func(m *cudaipc.MoverState) float64 { return float64(m.Copies) }},
	{moverDesc("ping_age_seconds", "Time since the last answer to a ping."), prometheus.GaugeValue,
		func(m *cudaipc.MoverState) float64 { return m.PingAge.Seconds() }},
	{moverDesc("starts_total", "Starts of the process."), prometheus.CounterValue,
		func(m *cudaipc.MoverState) float64 { return float64(m.Starts) }},
	{moverDesc("requests_total", "Requests sent to the process."), prometheus.CounterValue,
		func(m *cudaipc.MoverState) float64 { return float64(m.Requests) }},
}

var moverLostDesc = moverDesc("lost_total", "Processes that were lost, by reason.", "reason")

func moverDesc(name, help string, more ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvagent_mover_"+name, help, append([]string{"mover"}, more...), nil)
}

func describeMovers(ch chan<- *prometheus.Desc) {
	for _, s := range moverSeries {
		ch <- s.desc
	}
	ch <- moverLostDesc
	for _, s := range gpuSeries {
		ch <- s.desc
	}
}

func collectMovers(ch chan<- prometheus.Metric, movers []cudaipc.MoverState) {
	for i := range movers {
		m := &movers[i]
		for _, s := range moverSeries {
			ch <- prometheus.MustNewConstMetric(s.desc, s.kind, s.get(m), m.Name)
		}
		for _, reason := range cudaipc.LossReasons {
			ch <- prometheus.MustNewConstMetric(moverLostDesc, prometheus.CounterValue, float64(m.Lost[reason]), m.Name,
				string(reason))
		}
		collectGPU(ch, m)
	}
}

var orphanSeries = []struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	get  func(*Orphans) float64
}{
	{desc("kvagent_orphan_movers",
		"Movers of an earlier agent that cannot be ended: each keeps its engines' memory."), prometheus.GaugeValue,
		func(l *Orphans) float64 { return float64(len(l.PIDs)) }},
	{desc("kvagent_orphan_movers_ended_total", "Movers of an earlier agent that were ended."),
		prometheus.CounterValue, func(l *Orphans) float64 { return float64(l.Ended) }},
	{desc("kvagent_pool_file_abandoned",
		"1: a process that cannot be ended holds the pool's file; the pool started empty in a new one."),
		prometheus.GaugeValue, func(l *Orphans) float64 { return oneIf(l.Cold != "") }},
}

func describeLeft(ch chan<- *prometheus.Desc) {
	for _, s := range orphanSeries {
		ch <- s.desc
	}
}

func collectOrphans(ch chan<- prometheus.Metric, l Orphans) {
	for _, s := range orphanSeries {
		ch <- prometheus.MustNewConstMetric(s.desc, s.kind, s.get(&l))
	}
}

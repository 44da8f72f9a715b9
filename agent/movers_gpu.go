package agent

import (
	"encoding/json"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvagent/kvagent/cudaipc"
)

// gpuInfo is what the device of a mover last said of its GPU; ok is false for the host's, and before it has said anything.
func gpuInfo(m *cudaipc.MoverState) (i cudaipc.CUDAInfo, ok bool) {
	if m.Device != cudaipc.CUDADevice {
		return i, false
	}
	return i, len(m.Info) == 0 || json.Unmarshal(m.Info, &i) == nil // at zero until it says more
}

// gpuSeries are read of each mover that has a GPU; the label is the mover's name, which is the GPU's.
var gpuSeries = []struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	get  func(*cudaipc.CUDAInfo) float64
}{
	{gpuDesc("pool_pinned_bytes", "Bytes of the pool that are pinned for the GPU."), prometheus.GaugeValue, func(i *cudaipc.CUDAInfo) float64 { return float64(i.Pinned) }},
	{gpuDesc("pool_refused_bytes", "Bytes of the pool that the driver does not pin: their copies are slower."), prometheus.GaugeValue, func(i *cudaipc.CUDAInfo) float64 { return float64(i.Refused) }},
	{gpuDesc("pool_waiting_bytes", "Bytes of the pool that are not pinned yet."), prometheus.GaugeValue, func(i *cudaipc.CUDAInfo) float64 { return float64(i.Arena - i.Pinned - i.Refused) }},
	{gpuDesc("ring_bytes_total", "Bytes copied through the small pinned ring, because their place in the pool was not pinned."), prometheus.CounterValue, func(i *cudaipc.CUDAInfo) float64 { return float64(i.RingBytes) }},
	{gpuDesc("own_bytes", "Bytes of the GPU's memory that the mover takes for itself; 0: not measured."), prometheus.GaugeValue, func(i *cudaipc.CUDAInfo) float64 { return float64(i.Facts.Context) }},
	{gpuDesc("memory_free_bytes", "Bytes of the GPU's memory that are free."), prometheus.GaugeValue, func(i *cudaipc.CUDAInfo) float64 { return float64(i.Free) }},
	{gpuDesc("memory_bytes", "Bytes of the GPU's memory."), prometheus.GaugeValue, func(i *cudaipc.CUDAInfo) float64 { return float64(i.Total) }},
	{gpuDesc("imports", "Allocations, pieces and events of engines that are open."), prometheus.GaugeValue, func(i *cudaipc.CUDAInfo) float64 { return float64(i.Imports) }},
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

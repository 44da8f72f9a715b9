package admin

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvagent/kvagent/transfer/pace"
)

// PaceStatus is the state of one device's pacer in JSON.
type PaceStatus struct {
	Device   string  `json:"device"`         // cpu, or the GPU's name
	Setting  string  `json:"setting"`        // off, auto or fixed
	Rate     int64   `json:"rate_bytes_s"`   // that copies may take now; 0: any
	Slowdown float64 `json:"slowdown_ratio"` // decode steps beside copies, in those without, as last compared; 0: never
	Alone    uint64  `json:"steps_alone"`    // decode steps without copies
	Beside   uint64  `json:"steps_beside"`   // beside copies that can wait
	Other    uint64  `json:"steps_other"`    // not compared: beside other copies, or around a change
	Cuts     uint64  `json:"cuts"`
	Raises   uint64  `json:"raises"`
	Holds    uint64  `json:"holds"` // pauses to measure steps without copies
	// Waits for the budget, and their seconds.
	SaveWaits  uint64  `json:"save_waits"`
	SaveWaitS  float64 `json:"save_wait_s"`
	WriteWaits uint64  `json:"write_waits"` // of writes to tiers
	WriteWaitS float64 `json:"write_wait_s"`
}

func paceStatus(paces []pace.DeviceReport) []PaceStatus {
	out := []PaceStatus{}
	for i := range paces {
		p := &paces[i]
		n := &p.Counts
		out = append(out, PaceStatus{
			Device: p.Device, Setting: paceSetting(p.Setting), Rate: p.Rate, Slowdown: p.Slowdown,
			Alone: n.Alone, Beside: n.Beside, Other: n.Other, Cuts: n.Cuts, Raises: n.Raises, Holds: n.Holds,
			SaveWaits: n.Waits[pace.Save], SaveWaitS: n.Waited[pace.Save].Seconds(),
			WriteWaits: n.Waits[pace.Behind], WriteWaitS: n.Waited[pace.Behind].Seconds(),
		})
	}
	return out
}

func paceSetting(s int64) string {
	switch s {
	case pace.Off:
		return "off"
	case pace.Auto:
		return "auto"
	}
	return "fixed"
}

// paceSeries are read of each pacer; the label is its device.
var paceSeries = []struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	get  func(*pace.DeviceReport) float64
}{
	{paceDesc("rate_bytes_per_second", "Rate that copies that can wait may take now; 0: any."), prometheus.GaugeValue,
		func(p *pace.DeviceReport) float64 { return float64(p.Rate) }},
	{paceDesc("slowdown_ratio", "Decode steps beside such copies, in steps without, as last compared; 0: never."),
		prometheus.GaugeValue, func(p *pace.DeviceReport) float64 { return p.Slowdown }},
	{paceDesc("cuts_total", "Cuts of the rate."), prometheus.CounterValue,
		func(p *pace.DeviceReport) float64 { return float64(p.Counts.Cuts) }},
	{paceDesc("raises_total", "Raises of the rate."), prometheus.CounterValue,
		func(p *pace.DeviceReport) float64 { return float64(p.Counts.Raises) }},
	{paceDesc("holds_total", "Pauses of such copies to measure decode steps without them."), prometheus.CounterValue,
		func(p *pace.DeviceReport) float64 { return float64(p.Counts.Holds) }},
}

var (
	paceStepsDesc = paceDesc("steps_total", "Decode steps that engines reported: alone, beside copies that can wait, "+
		"or other (not compared).", "beside")
	paceWaitsDesc = paceDesc("waits_total", "Batches of copies that waited for the budget.", "op")
	paceWaitDesc  = paceDesc("wait_seconds_total", "Time that they waited.", "op")
)

// paceOps are the labels of what waits.
var paceOps = map[pace.Urgency]string{pace.Save: "save", pace.Behind: "write"}

func paceDesc(name, help string, more ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvagent_pace_"+name, help, append([]string{"device"}, more...), nil)
}

func describePaces(ch chan<- *prometheus.Desc) {
	for _, s := range paceSeries {
		ch <- s.desc
	}
	for _, d := range []*prometheus.Desc{paceStepsDesc, paceWaitsDesc, paceWaitDesc} {
		ch <- d
	}
}

func collectPaces(ch chan<- prometheus.Metric, paces []pace.DeviceReport) {
	for i := range paces {
		p := &paces[i]
		for _, s := range paceSeries {
			ch <- prometheus.MustNewConstMetric(s.desc, s.kind, s.get(p), p.Device)
		}
		n := &p.Counts
		for beside, n := range map[string]uint64{"none": n.Alone, "waiting": n.Beside, "other": n.Other} {
			ch <- prometheus.MustNewConstMetric(paceStepsDesc, prometheus.CounterValue, float64(n), p.Device, beside)
		}
		for u, op := range paceOps {
			ch <- prometheus.MustNewConstMetric(paceWaitsDesc, prometheus.CounterValue, float64(p.Counts.Waits[u]),
				p.Device, op)
			ch <- prometheus.MustNewConstMetric(paceWaitDesc, prometheus.CounterValue, p.Counts.Waited[u].Seconds(),
				p.Device, op)
		}
	}
}

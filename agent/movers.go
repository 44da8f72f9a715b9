package agent

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
)

// lostPeer ends the session of a worker whose memory was open in a process that is no more. Its copies have ended; the
// engine hears why, and registers again.
func (a *Agent) lostPeer(id cudaipc.PeerID, why error) {
	if s := a.peers.owner(id); s != nil {
		s.doom(endDevice, ipc.ErrCodeInternal, fmt.Errorf("the worker's memory is not open any more; register again: %w", why))
	}
}

// movers are the processes that the device has; none if it is in this one.
func (a *Agent) movers() []cudaipc.MoverState {
	if d, ok := a.device.(interface{ Movers() []cudaipc.MoverState }); ok {
		return d.Movers()
	}
	return nil
}

// MoverPIDs are the movers that run.
func (a *Agent) MoverPIDs() (pids []int) {
	for _, m := range a.movers() {
		if m.Pid != 0 {
			pids = append(pids, m.Pid)
		}
	}
	return pids
}

// moverProblem says which movers do not come back.
func (a *Agent) moverProblem() error {
	var failing []string
	for _, m := range a.movers() {
		if m.Failing {
			failing = append(failing, fmt.Sprintf("%s: %v", m.Name, m.LastLoss))
		}
	}
	if len(failing) == 0 {
		return nil
	}
	return fmt.Errorf("movers fail again and again: %s", strings.Join(failing, "; "))
}

// MoverStatus is one process that has engines' memory open.
type MoverStatus struct {
	Name        string            `json:"name"`
	Device      string            `json:"device"`
	PID         int               `json:"pid"` // 0: no process
	Running     bool              `json:"running"`
	UpSeconds   float64           `json:"up_seconds"`
	Node        string            `json:"numa_node"` // how it is bound; empty: it is not
	Peers       int               `json:"peers"`
	Copies      int               `json:"copies"`
	PingAgeMS   int64             `json:"ping_age_ms"`
	Starts      uint64            `json:"starts"`
	Requests    uint64            `json:"requests"`
	Lost        map[string]uint64 `json:"lost"` // by reason
	LastLoss    string            `json:"last_loss"`
	Failing     bool              `json:"failing"`        // it does not come back
	Info        json.RawMessage   `json:"info,omitempty"` // what the device says of itself
	NextStartMS int64             `json:"next_start_ms"`  // until it may be started again
}

func (a *Agent) moverStatus() []MoverStatus {
	out := []MoverStatus{}
	for _, m := range a.movers() {
		st := MoverStatus{
			Name: m.Name, Device: m.Device, PID: m.Pid, Running: m.Pid != 0, Node: m.Node, Peers: m.Peers, Copies: m.Copies,
			PingAgeMS: m.PingAge.Milliseconds(), Starts: m.Starts, Requests: m.Requests, Lost: make(map[string]uint64), Failing: m.Failing,
			NextStartMS: max(time.Until(m.NextStart).Milliseconds(), 0),
		}
		if st.Running {
			st.UpSeconds = time.Since(m.Since).Seconds()
		}
		for _, reason := range cudaipc.LossReasons {
			st.Lost[string(reason)] = m.Lost[reason]
		}
		if json.Valid(m.Info) {
			st.Info = m.Info
		}
		if m.LastLoss != nil {
			st.LastLoss = m.LastLoss.Error()
		}
		out = append(out, st)
	}
	return out
}

// logMovers tells in the log, once, what movers were started and what they will be.
func (a *Agent) logMovers() {
	for _, m := range a.movers() {
		a.log.Info("mover", zap.String("name", m.Name), zap.String("device", m.Device), zap.Int("pid", m.Pid), zap.String("numa_node", m.Node))
	}
}

// moverSeries are read of each mover; the label is its name.
var moverSeries = []struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	get  func(*cudaipc.MoverState) float64
}{
	{moverDesc("running", "1: the process runs."), prometheus.GaugeValue, func(m *cudaipc.MoverState) float64 { return oneIf(m.Pid != 0) }},
	{moverDesc("failing", "1: the process was lost several times in a row."), prometheus.GaugeValue, func(m *cudaipc.MoverState) float64 { return oneIf(m.Failing) }},
	{moverDesc("peers", "Workers whose memory is open in the process."), prometheus.GaugeValue, func(m *cudaipc.MoverState) float64 { return float64(m.Peers) }},
	{moverDesc("copies", "Copies under way."), prometheus.GaugeValue, func(m *cudaipc.MoverState) float64 { return float64(m.Copies) }},
	{moverDesc("ping_age_seconds", "Time since the last answer to a ping."), prometheus.GaugeValue, func(m *cudaipc.MoverState) float64 { return m.PingAge.Seconds() }},
	{moverDesc("starts_total", "Starts of the process."), prometheus.CounterValue, func(m *cudaipc.MoverState) float64 { return float64(m.Starts) }},
	{moverDesc("requests_total", "Requests sent to the process."), prometheus.CounterValue, func(m *cudaipc.MoverState) float64 { return float64(m.Requests) }},
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
			ch <- prometheus.MustNewConstMetric(moverLostDesc, prometheus.CounterValue, float64(m.Lost[reason]), m.Name, string(reason))
		}
		collectGPU(ch, m)
	}
}

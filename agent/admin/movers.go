package admin

import (
	"encoding/json"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

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

func moverStatus(movers []cudaipc.MoverState) []MoverStatus {
	out := []MoverStatus{}
	for _, m := range movers {
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

// LeftBehind is what the agents before this one left in its directory.
type LeftBehind struct {
	Ended uint64 `json:"ended"` // movers that this agent ended, or that ended while it watched
	PIDs  []int  `json:"pids"`  // movers that cannot be ended: each keeps the memory of the engines that it served
	Cold  string `json:"cold"`  // why the pool's file was given up, and the pool started empty; empty: it was not
}

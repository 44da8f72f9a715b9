package admin

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvagent/kvagent/pool"
)

var (
	budgetEvictedDesc = desc("kvagent_pool_budget_evicted_total", "Blocks evicted because of an owner's budget.")
	budgetRefusedDesc = desc("kvagent_pool_budget_refused_total",
		"Reservations refused because an owner's budget had no room, and nothing of the owner could be evicted.")

	ownerBytesDesc   = ownerDesc("bytes", "Bytes of the blocks in the pool that belong to an owner (an engine).")
	ownerBudgetDesc  = ownerDesc("budget_bytes", "Bytes that the blocks of an owner may have; 0: any number.")
	ownerEvictedDesc = ownerDesc("evicted_total", "Blocks of an owner that were evicted because of its budget.")
	ownerRefusedDesc = ownerDesc("refused_total", "Reservations of an owner that its budget had no room for.")
)

var ownersDescs = []*prometheus.Desc{
	budgetEvictedDesc, budgetRefusedDesc, ownerBytesDesc, ownerBudgetDesc, ownerEvictedDesc, ownerRefusedDesc,
}

func ownerDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("kvagent_pool_owner_"+name, help, []string{"owner"}, nil)
}

// collectOwners sends a series for each owner that is open or has blocks: pool.MaxOwners at most.
func collectOwners(ch chan<- prometheus.Metric, s *pool.OwnersStats) {
	count(ch, budgetEvictedDesc, s.Evicted)
	count(ch, budgetRefusedDesc, s.Refused)
	for i := range s.Each {
		o := &s.Each[i]
		for _, one := range []struct {
			desc  *prometheus.Desc
			kind  prometheus.ValueType
			value float64
		}{
			{ownerBytesDesc, prometheus.GaugeValue, float64(o.Bytes)},
			{ownerBudgetDesc, prometheus.GaugeValue, float64(o.Budget)},
			{ownerEvictedDesc, prometheus.CounterValue, float64(o.Evicted)},
			{ownerRefusedDesc, prometheus.CounterValue, float64(o.Refused)},
		} {
			ch <- prometheus.MustNewConstMetric(one.desc, one.kind, one.value, o.Name)
		}
	}
}

// OwnersStatus is pool.OwnersStats in JSON.
type OwnersStatus struct {
	Evicted uint64        `json:"evicted"` // because of a budget
	Refused uint64        `json:"refused"`
	List    []OwnerStatus `json:"list"`
}

// OwnerStatus is one owner that is open or has blocks in the pool.
type OwnerStatus struct {
	Name         string `json:"name"` // of an engine: its instance
	Open         bool   `json:"open"`
	Bytes        int64  `json:"bytes"`
	Budget       int64  `json:"budget_bytes"` // 0: none
	Evicted      uint64 `json:"evicted"`      // blocks, because of the budget
	EvictedBytes uint64 `json:"evicted_bytes"`
	Refused      uint64 `json:"refused"` // reservations
}

func ownersStatus(s *pool.OwnersStats) OwnersStatus {
	out := OwnersStatus{Evicted: s.Evicted, Refused: s.Refused, List: make([]OwnerStatus, len(s.Each))}
	for i, o := range s.Each {
		out.List[i] = OwnerStatus{
			Name: o.Name, Open: o.Open, Bytes: o.Bytes, Budget: o.Budget, Evicted: o.Evicted,
			EvictedBytes: o.EvictedBytes, Refused: o.Refused,
		}
	}
	return out
}

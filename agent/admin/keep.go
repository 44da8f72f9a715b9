package admin

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvagent/kvagent/agent/keep"
)

var (
	keptBlocksDesc = desc("kvagent_kept_blocks", "Blocks that are kept because a request asked for it.")
	keptBytesDesc  = desc("kvagent_kept_bytes", "Bytes of the blocks that are kept.")
	keptLimitDesc  = desc("kvagent_kept_bytes_limit", "Bytes that kept blocks may take: --keep-percent of the pool.")
	briefDesc      = desc("kvagent_brief_blocks", "Blocks that wait to be dropped at a time that a request gave.")

	keepRefusedDesc = desc("kvagent_keeps_refused_total",
		"Blocks that were not kept, or will not be dropped, because a limit was reached.")
	keepDroppedDesc = desc("kvagent_brief_blocks_dropped_total",
		"Blocks that were dropped at a time that a request gave, since nothing had used them.")
)

var keepDescs = []*prometheus.Desc{
	keptBlocksDesc, keptBytesDesc, keptLimitDesc, briefDesc, keepRefusedDesc, keepDroppedDesc,
}

func collectKeep(ch chan<- prometheus.Metric, r *keep.Report) {
	gauge(ch, keptBlocksDesc, r.Blocks)
	gauge(ch, keptBytesDesc, int(r.Bytes))
	gauge(ch, keptLimitDesc, int(r.Budget))
	gauge(ch, briefDesc, r.Brief)
	count(ch, keepRefusedDesc, r.Refused)
	count(ch, keepDroppedDesc, r.Dropped)
}

// KeepStatus is keep.Report in JSON.
type KeepStatus struct {
	Blocks  int    `json:"blocks"`
	Bytes   int64  `json:"bytes"`
	Limit   int64  `json:"bytes_limit"`
	Brief   int    `json:"brief_blocks"` // that wait to be dropped
	Refused uint64 `json:"refused"`      // blocks, because a limit was reached
	Dropped uint64 `json:"brief_dropped"`
	Ignored uint64 `json:"ignored"` // messages of sessions without an open space
}

func (v *View) keepStatus(r *keep.Report) KeepStatus {
	return KeepStatus{
		Blocks: r.Blocks, Bytes: r.Bytes, Limit: r.Budget, Brief: r.Brief, Refused: r.Refused, Dropped: r.Dropped,
		Ignored: v.metrics.KeepsIgnored.Load(),
	}
}

package admin

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvagent/kvagent/agent/events"
	"github.com/kvagent/kvagent/ipc"
)

var (
	eventSpacesDesc  = desc("kvagent_events_spaces", "Spaces whose engines ask for KV events.")
	eventSessionDesc = desc("kvagent_events_sessions", "Sessions that are told KV events.")
	eventBlocksDesc  = desc("kvagent_events_blocks", "Blocks whose tokens are kept for KV events.")
	eventToldDesc    = prometheus.NewDesc("kvagent_events_blocks_told", "Blocks that KV events tell of, by medium.",
		[]string{"medium"}, nil)
	eventBytesDesc   = desc("kvagent_events_bytes", "Memory that is taken for KV events, about.")
	eventRefusedDesc = desc("kvagent_events_blocks_refused_total",
		"Blocks whose tokens were not kept for KV events, because a limit was reached or they were not as many as "+
			"a block has.")
	eventGapsDesc = desc("kvagent_events_gaps_total",
		"Inventories that were told because a session had fallen too far behind to be told the changes.")
)

var (
	eventFileDesc   = desc("kvagent_events_file_bytes", "Size of the file of tokens for KV events of the next agent.")
	eventErrorsDesc = desc("kvagent_events_file_errors_total", "Failures of the file of tokens of KV events.")
)

var eventDescs = []*prometheus.Desc{
	eventSpacesDesc, eventSessionDesc, eventBlocksDesc, eventToldDesc, eventBytesDesc, eventRefusedDesc, eventFileDesc,
	eventErrorsDesc, eventGapsDesc,
}

func collectEvents(ch chan<- prometheus.Metric, r *events.Report) {
	gauge(ch, eventSpacesDesc, r.Spaces)
	gauge(ch, eventSessionDesc, r.Subscribers)
	gauge(ch, eventBlocksDesc, r.Blocks)
	for m, blocks := range r.Told {
		gauge(ch, eventToldDesc, blocks, mediumNames[uint8(m+ipc.MediumMemory)])
	}
	gauge(ch, eventBytesDesc, int(r.Bytes))
	count(ch, eventRefusedDesc, r.Refused)
	count(ch, eventGapsDesc, r.Gaps)
	gauge(ch, eventFileDesc, int(r.FileBytes))
	count(ch, eventErrorsDesc, r.FileErrors)
}

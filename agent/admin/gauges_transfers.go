package admin

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvagent/kvagent/agent/delivery"
	"github.com/kvagent/kvagent/pool/peer"
)

var (
	transfersDesc = prometheus.NewDesc("kvagent_transfers", "Transfers between engines, by state.",
		[]string{"state"}, nil)
	transfersTotalDesc = prometheus.NewDesc("kvagent_transfers_total",
		"What became of transfers: opened, completed, delivered, expired (not delivered in time), abandoned (open "+
			"when their session ended), displaced (by a newer one), refused (too many).", []string{"event"}, nil)
	transfersWaitingDesc = desc("kvagent_transfers_waiting",
		"Transfers for which the last look-up was told to wait.")
	transfersWaitedDesc = desc("kvagent_transfer_lookups_waited_total",
		"Answers to look-ups that name a transfer and were told to wait.")
	fetchesDesc      = desc("kvagent_peer_fetches", "Fetches from other agents that run.")
	fetchesTotalDesc = prometheus.NewDesc("kvagent_peer_fetches_total",
		"Fetches from other agents: started, and of those failed or cancelled; refused were not started.",
		[]string{"event"}, nil)

	peerEndsDesc = prometheus.NewDesc("kvagent_peer_fetches_ended_total",
		"Fetches from other agents, by how they ended.", []string{"end"}, nil)
	peerFailedDesc = prometheus.NewDesc("kvagent_peer_blocks_failed_total",
		"Blocks of fetches that were not stored, by reason; had: they were stored here already.",
		[]string{"reason"}, nil)
	peerConnectionsDesc   = desc("kvagent_peer_connections", "Connections of other agents.")
	peerSubscriptionsDesc = desc("kvagent_peer_subscriptions", "Fetches of other agents that are served.")
	peerStrangersDesc     = desc("kvagent_peer_unauthenticated_total",
		"Connections to the peer listener that did not authenticate in time.")

	peerReadsUpDesc = desc("kvagent_peer_reads_up",
		"1 if other agents' memory can be read by one-sided reads (--peer-rdma), else 0.")
	peerReadsDesc = prometheus.NewDesc("kvagent_peer_reads_blocks_total",
		"Blocks read from other agents by one-sided reads (in), and read by them (out); each shard counted.",
		[]string{"op"}, nil)
	peerReadBytesDesc   = desc("kvagent_peer_reads_bytes_total", "Bytes read from other agents by one-sided reads.")
	peerReadsFailedDesc = desc("kvagent_peer_reads_failed_total",
		"One-sided reads that failed: their blocks came in frames.")
	peerPinnedDesc = desc("kvagent_peer_pinned_bytes", "Bytes pinned for one-sided reads of other agents.")

	peerBlocksDesc = peerDesc("blocks_total", "Blocks fetched from other agents (in), and sent to them (out, each "+
		"shard counted).")
	peerBytesDesc   = peerDesc("bytes_total", "Bytes of them.")
	peerSecondsDesc = peerDesc("seconds_total", "Seconds of the fetches together (in), and of sending (out).")
)

// allPeers is the label of the sums over all peers.
const allPeers = "all"

func peerDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("kvagent_peer_"+name, help+" The peer \"all\" is the sum.", []string{"op", "peer"}, nil)
}

func describeTransfers(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{transfersDesc, transfersTotalDesc, transfersWaitingDesc, transfersWaitedDesc,
		fetchesDesc, fetchesTotalDesc, peerEndsDesc, peerFailedDesc, peerConnectionsDesc, peerSubscriptionsDesc,
		peerStrangersDesc, peerReadsUpDesc, peerReadsDesc, peerReadBytesDesc, peerReadsFailedDesc, peerPinnedDesc,
		peerBlocksDesc, peerBytesDesc, peerSecondsDesc} {
		ch <- d
	}
}

func gauge(ch chan<- prometheus.Metric, d *prometheus.Desc, v int, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
}

func count(ch chan<- prometheus.Metric, d *prometheus.Desc, v uint64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
}

func collectTransfers(ch chan<- prometheus.Metric, r *delivery.Report) {
	gauge(ch, transfersDesc, r.Open, "open")
	gauge(ch, transfersDesc, r.Complete, "complete")
	gauge(ch, transfersWaitingDesc, r.Waiting)
	gauge(ch, fetchesDesc, r.Fetching)
	count(ch, transfersWaitedDesc, r.Waited)
	for event, n := range map[string]uint64{
		"opened": r.Opened, "completed": r.Completed, "delivered": r.Delivered, "expired": r.Expired,
		"abandoned": r.Abandoned, "displaced": r.Displaced, "refused": r.Refused,
	} {
		count(ch, transfersTotalDesc, n, event)
	}
	for event, n := range map[string]uint64{
		"started": r.Fetches, "failed": r.FetchesFailed, "cancelled": r.FetchesCancelled, "refused": r.FetchesRefused,
	} {
		count(ch, fetchesTotalDesc, n, event)
	}
}

func collectPeers(ch chan<- prometheus.Metric, p *Peers) {
	c, s := &p.Client, &p.Server
	for end, n := range c.Done {
		if name := peer.End(end).String(); name != "" {
			count(ch, peerEndsDesc, n, name)
		}
	}
	for reason, n := range c.Failed {
		count(ch, peerFailedDesc, n, peer.Reason(reason).String())
	}
	gauge(ch, peerConnectionsDesc, s.Connections)
	gauge(ch, peerSubscriptionsDesc, s.Subscriptions)
	count(ch, peerStrangersDesc, s.Unauthenticated)
	up := 0
	if p.Reads.Protocol != "" && p.Reads.Reason == nil {
		up = 1
	}
	gauge(ch, peerReadsUpDesc, up)
	count(ch, peerReadsDesc, c.Read, "in")
	count(ch, peerReadsDesc, s.Placed, "out")
	count(ch, peerReadBytesDesc, c.ReadBytes)
	count(ch, peerReadsFailedDesc, c.ReadsFailed)
	ch <- prometheus.MustNewConstMetric(peerPinnedDesc, prometheus.GaugeValue, float64(s.Pinned))
	traffic(ch, "in", allPeers, c.Blocks, c.Bytes, c.Seconds)
	for i := range c.Peers {
		traffic(ch, "in", c.Peers[i].Peer, c.Peers[i].Blocks, c.Peers[i].Bytes, c.Peers[i].Seconds)
	}
	traffic(ch, "out", allPeers, s.Blocks, s.Bytes, s.Seconds)
	for i := range s.Peers {
		traffic(ch, "out", s.Peers[i].Peer, s.Peers[i].Blocks, s.Peers[i].Bytes, s.Peers[i].Seconds)
	}
}

// traffic collects what went in one direction.
func traffic(ch chan<- prometheus.Metric, op, peer string, blocks, bytes uint64, seconds float64) {
	count(ch, peerBlocksDesc, blocks, op, peer)
	count(ch, peerBytesDesc, bytes, op, peer)
	ch <- prometheus.MustNewConstMetric(peerSecondsDesc, prometheus.CounterValue, seconds, op, peer)
}

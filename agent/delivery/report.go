package delivery

// Report is the state of a table, for people and metrics.
type Report struct {
	Open     int `json:"open" metric:"transfers{state=open}"`
	Complete int `json:"complete" metric:"transfers{state=complete}"`
	Waiting  int `json:"waiting" metric:"transfers{state=waiting}"` // the last look-up was told to wait
	Fetching int `json:"fetching"`                                  // fetches that run
	Counts
}

// Counts are the counters of a table since its start.
type Counts struct {
	Opened    uint64 `json:"opened" metric:"transfers_total{event=opened}"`
	Completed uint64 `json:"completed" metric:"transfers_total{event=completed}"`
	Delivered uint64 `json:"delivered" metric:"transfers_total{event=delivered}"`
	Expired   uint64 `json:"expired" metric:"transfers_total{event=expired}"`     // not delivered in time
	Abandoned uint64 `json:"abandoned" metric:"transfers_total{event=abandoned}"` // open when their session ended
	Displaced uint64 `json:"displaced" metric:"transfers_total{event=displaced}"` // complete, ended for a newer one
	Refused   uint64 `json:"refused" metric:"transfers_total{event=refused}"`     // not opened: too many
	Waited    uint64 `json:"waited" metric:"transfers_total{event=waited}"`       // answers that said to wait

	Fetches          uint64 `json:"fetches" metric:"peer_fetches_total{event=started}"`
	FetchesFailed    uint64 `json:"fetches_failed" metric:"peer_fetches_total{event=failed}"` // not served to the end
	FetchesCancelled uint64 `json:"fetches_cancelled" metric:"peer_fetches_total{event=cancelled}"`
	FetchesRefused   uint64 `json:"fetches_refused" metric:"peer_fetches_total{event=refused}"` // too many, or nobody
}

// Report returns the state and the counters.
func (t *Table) Report() Report {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expireLocked(t.cfg.Now())
	return Report{
		Open:     len(t.mu.transfers) - t.mu.complete.Len() - t.mu.delivered,
		Complete: t.mu.complete.Len(),
		Waiting:  len(t.mu.waits),
		Fetching: t.mu.fetching,
		Counts:   t.mu.count,
	}
}

package delivery

// Report is the state of a table, for people and metrics.
type Report struct {
	Open, Complete int // transfers
	Waiting        int // transfers for which the last look-up was told to wait
	Fetching       int // fetches that run
	Counts
}

// Counts are the counters of a table since its start.
type Counts struct {
	Opened    uint64 // transfers
	Completed uint64
	Delivered uint64
	Expired   uint64 // not delivered in time
	Abandoned uint64 // open when their session ended
	Displaced uint64 // complete, and ended for a newer one
	Refused   uint64 // not opened: too many
	Waited    uint64 // answers to look-ups that said to wait

	Fetches          uint64 // started
	FetchesFailed    uint64 // of those: the other agent did not serve them to the end
	FetchesCancelled uint64 // of those: no longer wanted
	FetchesRefused   uint64 // not started: too many, or no other agent can be asked
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

package admin

import "github.com/kvagent/kvagent/pool"

// TiersStatus is the state of the tiers below the pool's memory.
type TiersStatus struct {
	Promises     int          `json:"promises"` // blocks being fetched to memory
	PromiseBytes int64        `json:"promise_bytes"`
	PromiseCap   int64        `json:"promise_cap_bytes"`
	Promised     uint64       `json:"promised"`
	Fulfilled    uint64       `json:"fulfilled"`
	Failed       uint64       `json:"failed"`
	Cancelled    uint64       `json:"cancelled"`
	Expired      uint64       `json:"expired"`                   // of failed: open at their deadlines
	Prefill      float64      `json:"prefill_tokens_per_second"` // rate by which answers are cut; 0: they are not cut
	Adopted      uint64       `json:"resets_adopted"`            // of other nodes
	Again        uint64       `json:"resets_repeated"`           // that collided with another node's
	List         []TierStatus `json:"list"`
}

// TierStatus is one tier, see pool.TierStatus.
type TierStatus struct {
	Name     string `json:"name"`
	State    string `json:"state"`
	Error    string `json:"error,omitempty"`
	Store    string `json:"store"`                  // the store's own state: ok, or such as full, readonly, denied
	Reason   string `json:"store_reason,omitempty"` // of a state other than ok
	Local    bool   `json:"local"`
	Write    string `json:"write"`
	Used     int64  `json:"used_bytes"`
	Capacity int64  `json:"capacity_bytes"`
	Items    int64  `json:"items"`

	QueueFetch  int `json:"queue_fetch"`
	QueuePut    int `json:"queue_put"`
	QueueDelete int `json:"queue_delete"`

	Hits     uint64 `json:"hits"`
	Misses   uint64 `json:"misses"`
	BytesIn  uint64 `json:"bytes_in"`
	BytesOut uint64 `json:"bytes_out"`
	Corrupt  uint64 `json:"corrupt"`
	Timeouts uint64 `json:"timeouts"`
	Errors   uint64 `json:"errors"`
	Opened   uint64 `json:"breaker_opened"`
	Stored   uint64 `json:"puts_stored"`
	Had      uint64 `json:"puts_had"`
	Dropped  uint64 `json:"puts_dropped"`
	Failed   uint64 `json:"puts_failed"` // refused as full, or a call failed
	Deleted  uint64 `json:"deleted"`
	Asked    uint64 `json:"asked"`
	Found    uint64 `json:"found"`
	Late     uint64 `json:"asks_late"`

	MarkFails uint64 `json:"reset_marker_failures"`

	FetchRate float64 `json:"fetch_bytes_per_second"`
	FetchMS   float64 `json:"fetch_ms"`
	PutMS     float64 `json:"put_ms"`
	AskMS     float64 `json:"ask_ms"`

	Counts map[string]uint64 `json:"store_counts"` // the store's own, since the start
}

// tiersStatus returns nil without tiers.
func tiersStatus(r *pool.TierReport) *TiersStatus {
	if r == nil {
		return nil
	}
	out := &TiersStatus{
		Promises: r.Promises, PromiseBytes: r.PromiseBytes, PromiseCap: r.PromiseCap, Promised: r.Promised,
		Fulfilled: r.Fulfilled, Failed: r.Failed,
		Cancelled: r.Cancelled, Expired: r.Expired, Prefill: r.Prefill,
		Adopted: r.Adopted, Again: r.Again, List: make([]TierStatus, len(r.Tiers)),
	}
	for i := range r.Tiers {
		out.List[i] = tierStatus(&r.Tiers[i])
	}
	return out
}

func tierStatus(t *pool.TierStatus) TierStatus {
	const ms = 1000
	counts := make(map[string]uint64, len(t.Store.Counts))
	for _, c := range t.Store.Counts {
		counts[c.Name] = c.N
	}
	return TierStatus{
		Store: t.Store.State, Reason: t.Store.Reason, Counts: counts,
		Name: t.Name, State: t.State, Error: t.Error, Local: t.Local, Write: t.Write,
		Used: t.Usage.Bytes, Capacity: t.Usage.Capacity, Items: t.Usage.Items,
		QueueFetch: t.Fetching + t.Hinted, QueuePut: t.Putting, QueueDelete: t.Deleting,
		Hits: t.Hits, Misses: t.Misses, BytesIn: t.BytesIn, BytesOut: t.BytesOut, Corrupt: t.Corrupt,
		Timeouts: t.Timeouts, Errors: t.Errors,
		Opened: t.Opened, Stored: t.Stored, Had: t.Had, Dropped: t.Dropped, Failed: t.Full + t.Lost, Deleted: t.Deleted,
		Asked: t.Asked, Found: t.Found, Late: t.AskLate,
		MarkFails: t.MarkFails,
		FetchRate: t.Rate, FetchMS: t.FetchSeconds * ms, PutMS: t.PutSeconds * ms, AskMS: t.AskSeconds * ms,
	}
}

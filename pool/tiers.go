package pool

// Asked is a chain of one group that a look-up will ask the Index for.
type Asked struct {
	Group  uint8
	Hashes Hashes
	Sparse bool // blocks after a gap count too
}

// TierReport is the state and the counters of the tiers below a memory.
type TierReport struct {
	Promises     int    `json:"promises" metric:"promises"` // entries being fetched to memory
	PromiseBytes int64  `json:"promise_bytes" metric:"promise_bytes"`
	PromiseCap   int64  `json:"promise_cap_bytes"` // the prefetch budget
	Promised     uint64 `json:"promised" metric:"promises_total{event=made}"`
	Fulfilled    uint64 `json:"fulfilled" metric:"promises_total{event=fulfilled}"` // arrived in memory
	Failed       uint64 `json:"failed" metric:"promises_total{event=failed}"`       // to arrive
	Cancelled    uint64 `json:"cancelled" metric:"promises_total{event=cancelled}"` // of those: no longer wanted
	Expired      uint64 `json:"expired" metric:"promises_total{event=expired}"`     // of those: open at their deadline
	// Adopted are resets of other nodes; Again are resets repeated because they collided with
	// another node's.
	Adopted uint64       `json:"resets_adopted" metric:"resets_total{origin=elsewhere}"`
	Again   uint64       `json:"resets_repeated" metric:"resets_total{origin=collision}"`
	Tiers   []TierStatus `json:"list"`
}

// TierStatus is the state of one tier. Entries are blocks with all their shards.
type TierStatus struct {
	Name   string      `json:"name" label:"tier"`
	Write  string      `json:"write"`
	Local  bool        `json:"local"`
	State  string      `json:"state"`               // up, half-open, open (not asked), full (not written)
	Up     bool        `json:"up" metric:"tier_up"` // State is up or full
	Error  string      `json:"error,omitempty"`     // the last failure, unless the tier is up
	Usage  Usage       `json:"usage"`
	Store  StoreReport `json:"store"`                                             // zero: none
	Tries  uint64      `json:"breaker_tries"`                                     // after it was suspended
	Opened uint64      `json:"breaker_opened" metric:"tier_breaker_opened_total"` // suspended after repeated failures

	// Entries, and keys to be deleted, in the queues.
	Fetching int `json:"queue_fetch" metric:"tier_queue{queue=fetch}"`
	Hinted   int `json:"queue_hints" metric:"tier_queue{queue=hint}"`
	Putting  int `json:"queue_put" metric:"tier_queue{queue=put}"`
	Deleting int `json:"queue_delete" metric:"tier_queue{queue=delete}"`

	Hits     uint64 `json:"hits" metric:"tier_fetched_blocks_total{result=hit}"`    // entries fetched
	Misses   uint64 `json:"misses" metric:"tier_fetched_blocks_total{result=miss}"` // not found, or not usable
	BytesIn  uint64 `json:"bytes_in" metric:"tier_bytes_total{op=in}"`              // read from the store
	BytesOut uint64 `json:"bytes_out" metric:"tier_bytes_total{op=out}"`            // written to it
	Corrupt  uint64 `json:"corrupt" metric:"tier_corrupt_total"`                    // values that did not verify
	Timeouts uint64 `json:"timeouts" metric:"tier_failures_total{failure=timeout}"` // calls
	Errors   uint64 `json:"errors" metric:"tier_failures_total{failure=error}"`     // calls
	Stored   uint64 `json:"puts_stored" metric:"tier_puts_total{result=stored}"`    // entries
	Had      uint64 `json:"puts_had" metric:"tier_puts_total{result=had}"`          // already there
	Full     uint64 `json:"puts_full" metric:"tier_puts_total{result=full}"`        // refused as full
	Lost     uint64 `json:"puts_failed" metric:"tier_puts_total{result=failed}"`    // not written otherwise
	// Dropped are entries not offered: the queue was full or memory no longer had them.
	Dropped     uint64 `json:"puts_dropped" metric:"tier_puts_total{result=dropped}"`
	Deleted     uint64 `json:"deleted"` // keys
	DeletesLost uint64 `json:"deletes_failed"`
	Asked       uint64 `json:"asked" metric:"tier_asked_blocks_total{result=asked}"` // entries, by look-ups
	Found       uint64 `json:"found" metric:"tier_asked_blocks_total{result=found}"`
	AskLate     uint64 `json:"asks_late" metric:"tier_asks_lost_total{reason=late}"`     // look-ups answered pending
	AskFailed   uint64 `json:"asks_failed" metric:"tier_asks_lost_total{reason=failed}"` // questions
	AskRefused  uint64 `json:"asks_refused" metric:"tier_asks_lost_total{reason=queue}"` // entries: queue full

	// MarkFails are failed rounds for markers of resets.
	MarkFails uint64 `json:"reset_marker_failures" metric:"tier_reset_marker_failures_total"`

	Rate float64 `json:"fetch_bytes_per_second"` // moving average
	// Seconds of a batch, moving averages.
	FetchSeconds float64 `json:"fetch_seconds" metric:"tier_seconds{op=fetch}"`
	PutSeconds   float64 `json:"put_seconds" metric:"tier_seconds{op=put}"`
	AskSeconds   float64 `json:"ask_seconds" metric:"tier_seconds{op=ask}"`
}

// Cold is an entry that is among the next to be evicted.
type Cold struct {
	Space SpaceID
	Group uint8
	Hash  Hash
}

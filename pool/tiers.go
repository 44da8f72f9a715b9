package pool

// Asked is a chain of one group that a look-up will ask the Index for.
type Asked struct {
	Group  uint8
	Hashes Hashes
	Sparse bool // blocks after a gap count too
}

// TierReport is the state and the counters of the tiers below a memory.
type TierReport struct {
	Promises     int    // entries being fetched to memory
	PromiseBytes int64  // of them
	PromiseCap   int64  // the prefetch budget, bytes
	Promised     uint64 // since the start
	Fulfilled    uint64 // arrived in memory
	Failed       uint64 // failed to arrive
	Cancelled    uint64 // of those: no longer wanted
	Expired      uint64 // of those: open at their deadline
	// Prefill is the rate at which an engine computes, tokens per second, which bounds the answers:
	// as configured, or as learned of the fastest space. 0: answers are not bounded.
	Prefill float64
	Adopted uint64 // resets of other nodes that were adopted
	Again   uint64 // resets repeated because they collided with another node's
	Tiers   []TierStatus
}

// TierStatus is the state of one tier. Entries are blocks with all their shards.
type TierStatus struct {
	Name, Write string
	Local       bool
	State       string // up, half-open, open (not asked), full (not written)
	Error       string // the last failure, unless the tier is up
	Usage       Usage
	Store       StoreReport // the store's own report; zero if it has none
	Opened      uint64      // times that it was suspended after repeated failures
	Tries       uint64      // attempts to use it again after that

	Fetching, Hinted, Putting, Deleting int // entries, and keys to be deleted, in the queues

	Hits, Misses            uint64 // entries fetched; not found, or not usable
	BytesIn, BytesOut       uint64 // read from the store; written to it
	Corrupt                 uint64 // values that did not verify
	Timeouts, Errors        uint64 // calls
	Stored, Had, Full, Lost uint64 // entries written; already there; refused as full; not written otherwise
	Dropped                 uint64 // entries not offered: the queue was full or memory no longer had them
	Deleted, DeletesLost    uint64 // keys
	Asked, Found            uint64 // entries asked for by look-ups; found
	// look-ups answered pending; failed questions; entries not asked for: queue full
	AskLate, AskFailed, AskRefused uint64

	MarkFails uint64 // failed rounds for markers of resets

	Rate                                 float64 // bytes per second of a fetch, moving average
	FetchSeconds, PutSeconds, AskSeconds float64 // of a batch, moving averages
}

// Cold is an entry that is among the next to be evicted.
type Cold struct {
	Space SpaceID
	Group uint8
	Hash  Hash
}

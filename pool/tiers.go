package pool

// Asked is a chain of one group that a look-up will ask the Index for.
type Asked struct {
	Group  uint8
	Hashes Hashes
	Sparse bool // not only the leading hashes count
}

// TierReport is a stack below memory, now and since its start.
type TierReport struct {
	Promises     int    // entries being brought to memory, not there yet
	PromiseBytes int64  // of them
	PromiseCap   int64  // the prefetch budget, bytes
	Promised     uint64 // ever
	Landed       uint64 // came to memory
	Unkept       uint64 // did not
	Cancelled    uint64 // of those: nobody wanted them any more
	Expired      uint64 // of those: open at their deadline
	// Prefill is what an engine computes, tokens a second, by which answers are cut: as it was
	// given, or the fastest space's as it was learned. 0: they are not.
	Prefill float64
	Adopted uint64 // resets of other nodes that were taken over
	Again   uint64 // resets that met another node's and were made once more
	Names   int    // names in tiers that nobody uses and that are still to be collected
	Lost    uint64 // of those, names that were not noted because too many waited
	// Unused is how often a named generation that this node had not used for a named time was to be
	// collected; UsedElsewhere is how often another node was seen to use it.
	Unused, UsedElsewhere uint64
	Tiers                 []TierStatus
}

// TierStatus is one tier. Entries are blocks with all their shards.
type TierStatus struct {
	Name, Write string
	Local       bool
	State       string // up, half-open, open (nobody asks it), full (nothing is written)
	Error       string // the last failure, while it is not up
	Usage       Usage
	Store       StoreReport // what the store says of itself; the zero value if it does not
	Opened      uint64      // times it failed so often that nobody asked it any more
	Tries       uint64      // whether it is back

	Fetching, Hinted, Putting, Deleting int // entries, and keys to be deleted, that wait

	Hits, Misses                   uint64 // entries fetched; not found, or not usable
	BytesIn, BytesOut              uint64 // out of the store; into it
	Corrupt                        uint64 // values that did not verify
	Timeouts, Errors               uint64 // calls
	Stored, Had, Full, Lost        uint64 // entries written; there already; refused as full; not written for another reason
	Dropped                        uint64 // entries not offered to it, because too many waited or memory had them no more
	Deleted, DeletesLost           uint64 // keys
	Asked, Found                   uint64 // entries asked for by look-ups; of them found
	AskLate, AskFailed, AskRefused uint64 // look-ups told pending; questions that failed; entries not asked because too many waited

	Collecting                int    // names that nobody uses, still to be collected there
	Collected, CollectedBytes uint64 // shards deleted for that
	CollectFails, MarkFails   uint64 // looks for them that failed; rounds for markers of resets that failed

	Rate                                 float64 // bytes a second of a fetch, moving average
	FetchSeconds, PutSeconds, AskSeconds float64 // of a batch, moving averages
}

// Cold is an entry that is among the next to be evicted.
type Cold struct {
	Space SpaceID
	Group uint8
	Hash  Hash
}

package pool

import "time"

// Tiers is what a pool that has tiers below its memory can do besides. Through its Index an entry of a tier that is known
// to be there is stored like one in memory: Prefix and Exists count it, and Pin promises it. A promise is a Ref like a pin:
// the entry is being brought to memory, and is pinned there once it came. Unpin ends it, whatever became of it.
type Tiers interface {
	// Ask finds out what the tiers have of the chains, where that is not known, and waits for it until the deadline at most.
	// It says whether some tier is still asked then: what it answers will be known to a later call.
	Ask(s SpaceID, asked []Asked, deadline time.Time) (pending bool)
	// Settle calls then, once, from any goroutine and maybe before it returns, when no ref is a promise that is still open:
	// each entry is pinned in memory, or did not come and Acquire will find it Missing. It does not keep refs. cancel makes sure
	// that then is not called any more, and says whether it had not been.
	Settle(refs []Ref, then func()) (cancel func() bool)
	// Hint takes pins back like Unpin, but what they promised comes nevertheless, as far as it has room: a probe found it, and who probes will
	// come again.
	Hint(refs []Ref)
	// Computed tells that an engine of a space computed so many tokens of prompts in one step, and how long that took: what tells whether it is
	// worth its time to bring a block up.
	Computed(s SpaceID, tokens int, took time.Duration)
	// Report is what each tier is and did, the nearest first, for people and metrics.
	Report() TierReport
}

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
	// Prefill is what an engine computes, tokens a second, by which answers are cut: as it was given, or the fastest space's as it was learned. 0: they are not.
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

// Chilling is what a memory can do besides, for a stack that writes what is about to go.
type Chilling interface {
	// Coldest fills out with entries that may go next and are held by nobody, and says how many: those that were not used for longest, about in their order, and
	// where others may go as well some of these, so that many calls name all. What is stored, and in which order it goes, stays as it is.
	Coldest(out []Cold) int
	// Glance is Acquire of each entry, read, and Release with the status that read gives, one entry after the other, without counting as a use:
	// what nobody else used meanwhile is as near to its eviction as before. No lock is held while read runs.
	Glance(b *Batch, read func(s Slot) Status)
}

// SpaceCounter is what a memory can do besides: count the entries of one space, 0 if it is not open.
type SpaceCounter interface {
	SpaceEntries(s SpaceID) int64
}

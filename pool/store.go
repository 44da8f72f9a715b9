package pool

import "context"

// Item is one shard in a batch: its key, its bytes and its status.
type Item struct {
	Key    Key
	Parent Hash   // Put: hash of the block before it; Len 0 at the start of a prompt
	Data   []byte // Put: the bytes, at least one. Get: the destination, whose length must be the stored one
	Status Status
}

// Usage is the use of a store in bytes and items; zero where the store does not know.
type Usage struct {
	Bytes    int64 `json:"bytes" metric:"tier_used_bytes"`
	Capacity int64 `json:"capacity_bytes" metric:"tier_capacity_bytes"` // 0: unknown
	Items    int64 `json:"items"`
}

// Store holds blocks: one shard per key, batch after batch, with a status for each key. An
// implementation MUST:
//
// - accept batches from several goroutines at once;
// - get Missing only where it knows that the key is not stored, since the caller then deletes the
// block's other shards; what it cannot tell of is Busy;
// - never return a partial shard, and return the bytes that were put under a key, or a status other
// than OK; what others change in a shared store is found by the caller, whose values have a header
// with their sum (tier/transit);
// - set every item's Status when it returns nil, and return an error only if the whole batch was
// not tried, or was cut off by ctx (statuses already decided stay);
// - treat a second Put of a key as Exists, and keep the first;
// - not keep Data after it returned, unless the error is an InUse.
//
// It is a cache: it MAY drop any key at any time. pooltest.TestStore checks all of this.
type Store interface {
	Put(ctx context.Context, items []Item) error
	Get(ctx context.Context, items []Item) error
	Exists(ctx context.Context, keys []Key, status []Status) error
	Delete(ctx context.Context, keys []Key) error
	Usage() Usage
}

// StoreReport is the state of a store, for people and machines.
type StoreReport struct {
	// State is "ok", or another one that the store's package defines.
	State  string  `json:"state" metric:"tier_store_state" label:"state"`
	Reason string  `json:"reason,omitempty"` // of a state other than "ok"
	Counts []Count `json:"counts"`           // since the start: always the same names and order
}

// Count is a named counter.
type Count struct {
	Name string `json:"name" label:"event"` // lower case, with underscores
	N    uint64 `json:"n" metric:"tier_store_events_total"`
}

// InUse is the error of a Put or a Get that its context cut off while another process was still
// reading or writing the Data of its items in shared memory. That process may use Data until Done
// is closed. Only a store that was given such memory returns it.
type InUse struct {
	Done <-chan struct{}
	Err  error // the context's
}

func (e *InUse) Error() string { return e.Err.Error() + ", and the data is still in use" }

// Unwrap returns the context's error.
func (e *InUse) Unwrap() error { return e.Err }

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
	State  string      `json:"state"`               // up, open (not asked), full (not written)
	Up     bool        `json:"up" metric:"tier_up"` // State is up or full
	Error  string      `json:"error,omitempty"`     // the last failure, unless the tier is up
	Usage  Usage       `json:"usage"`
	Store  StoreReport `json:"store"`                                             // zero: none
	Opened uint64      `json:"breaker_opened" metric:"tier_breaker_opened_total"` // suspended after repeated failures

	// Entries in the queues.
	Fetching int `json:"queue_fetch" metric:"tier_queue{queue=fetch}"`
	Putting  int `json:"queue_put" metric:"tier_queue{queue=put}"`

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
	Dropped    uint64 `json:"puts_dropped" metric:"tier_puts_total{result=dropped}"`
	Deleted    uint64 `json:"deleted"`                                              // keys
	Asked      uint64 `json:"asked" metric:"tier_asked_blocks_total{result=asked}"` // entries, by look-ups
	Found      uint64 `json:"found" metric:"tier_asked_blocks_total{result=found}"`
	AskLate    uint64 `json:"asks_late" metric:"tier_asks_lost_total{reason=late}"`     // look-ups answered pending
	AskFailed  uint64 `json:"asks_failed" metric:"tier_asks_lost_total{reason=failed}"` // questions
	AskRefused uint64 `json:"asks_refused" metric:"tier_asks_lost_total{reason=queue}"` // entries: queue full

	// MarkFails are failed rounds for markers of resets.
	MarkFails uint64 `json:"reset_marker_failures" metric:"tier_reset_marker_failures_total"`

	// Seconds of a batch, moving averages.
	FetchSeconds float64 `json:"fetch_seconds" metric:"tier_seconds{op=fetch}"`
	PutSeconds   float64 `json:"put_seconds" metric:"tier_seconds{op=put}"`
	AskSeconds   float64 `json:"ask_seconds" metric:"tier_seconds{op=ask}"`
}

// Exposed is how other nodes read this one's arena by one-sided reads.
type Exposed struct {
	Protocol string // "tcp" or "rdma"
	Target   string // by which their readers reach this one; 1 to MaxTarget bytes
	Address  uint64 // of the arena's first byte there
}

// MaxTarget bounds Exposed.Target, bytes.
const MaxTarget = 256

// Pull is a piece of another node's memory to be read into this one's arena.
type Pull struct {
	Offset  int64  // in the arena
	Length  int64  // bytes, at least 1
	Address uint64 // at the other node
}

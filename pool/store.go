package pool

import "context"

// Item is one shard in a batch: its key, its bytes and its status.
type Item struct {
	Key    Key
	Parent Hash   // Put: hash of the block before it; Len 0 at the start of a prompt
	Data   []byte // Put: the bytes. Get: the destination, whose length must be the stored one
	Status Status
}

// Usage is the use of a store in bytes and items.
type Usage struct {
	Bytes    int64 `json:"bytes" metric:"tier_used_bytes"`
	Capacity int64 `json:"capacity_bytes" metric:"tier_capacity_bytes"` // 0: unknown
	Items    int64 `json:"items"`
}

// Store holds blocks: one shard per key, batch after batch, with a status for each key. An
// implementation MUST:
//
// - accept batches from several goroutines at once;
// - never return a partial shard, and return exactly the bytes that were put under a key, or a
// status other than OK;
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

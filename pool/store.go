package pool

import "context"

// Item is one shard in a batch: its key, its bytes, and what became of it.
type Item struct {
	Key    Key
	Parent Hash   // Put: hash of the block before it; Len 0 at the start of a prompt
	Data   []byte // Put: the bytes. Get: where they go; its length must be the stored one
	Status Status
}

// Usage of a store in bytes and items.
type Usage struct {
	Bytes, Capacity int64 // Capacity 0: not known
	Items           int64
}

// Store is the seam behind which blocks are kept: one shard per key, batch after batch, a status
// for each key.
//
// An implementation MUST: take batches from several goroutines at once; never show a shard that is
// not whole; return exactly the bytes that were put under a key or a status other than OK; set
// every item's Status when it returns nil; return an error only when the batch as a whole was not
// tried or was cut off by ctx (statuses of items already decided stay); treat a second Put of a key
// as Exists and keep the first; not keep Data after it returned, unless the error is an InUse. It
// MAY forget any key at any time: it is a cache. pooltest.TestStore holds it to this.
type Store interface {
	Put(ctx context.Context, items []Item) error
	Get(ctx context.Context, items []Item) error
	Exists(ctx context.Context, keys []Key, status []Status) error
	Delete(ctx context.Context, keys []Key) error
	Usage() Usage
}

// StoreReport is how a store is, for people and machines.
type StoreReport struct {
	State  string  // "ok", or another one that the store's package names
	Reason string  // of another one
	Counts []Count // since it was opened: always the same ones in the same order
}

// Count is how often something happened.
type Count struct {
	Name string // lower case, with underscores
	N    uint64
}

// InUse is the error of a Put or a Get that was cut off by its context while another process was at
// work on the Data of its items, in memory that they share: until Done is closed Data is read or
// written. Only a store that was given such memory says so.
type InUse struct {
	Done <-chan struct{}
	Err  error // of the context
}

func (e *InUse) Error() string { return e.Err.Error() + ", and the data is still in use" }

// Unwrap is the context's error.
func (e *InUse) Unwrap() error { return e.Err }

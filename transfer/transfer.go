// Package transfer moves blocks between a device and the pool: bounded queues, a sending and a
// receiving thread for each engine worker, and the layout of blocks in the engine's memory.
package transfer

import (
	"errors"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer/pace"
)

// Statuses of blocks besides those of package pool; the numbers are those of the session protocol.
const (
	Revoked   pool.Status = 16 // save: the engine revoked it; nothing was stored
	Cancelled pool.Status = 17 // cancelled, or the worker was closed
	TimedOut  pool.Status = 18 // the engine's event or step word timed out; nothing was touched
	Failed    pool.Status = 19 // the device could not copy it
	Off       pool.Status = 20 // loads, or saves, are switched off
)

// Kind of a job.
type Kind uint8

// The kinds of jobs; the numbers are those of cudaipc's directions.
const (
	Save Kind = iota
	Load
)

// Section is a run of chained blocks of one group.
type Section struct {
	Group  uint8
	Parent []byte // save: hash of the block before the first, empty at the start of a prompt
	Hashes pool.Hashes
	Blocks []uint32 // the engine's block ID of each hash
}

// Job is one save or load of one engine worker. The worker owns everything in it after Submit.
type Job struct {
	ID    uint64 // chosen by the engine, unique in its session
	Kind  Kind
	Epoch uint32 // the weights epoch the engine is in
	// save: the step that computed the blocks; load: the step in flight; awaited before any byte is
	// touched
	Step     uint64
	Event    uint32 // the event recorded after that step, or cudaipc.None
	Revoke   uint32 // save: index of the revocation word, or cudaipc.None
	Sections []Section
	Staged   *Staged // a load that is copied by stages; nil: others
}

// Completion reports a job, exactly once: a status for each block of all sections in order, the
// worst of its shards that the worker holds. When it is reported, no byte of the job's engine
// blocks is being touched or will be.
type Completion struct {
	Job      uint64
	Kind     Kind
	Sections []Section // of the job
	Status   []pool.Status
	Bytes    int64 // bytes moved
	Sample   SampleCounts
	Times    Times
}

// ErrBusy is returned when a queue is full: the caller counts and skips.
var ErrBusy = errors.New("queue full")

// ErrInvalid is wrapped by Submit's error for a job that names what the worker does not have.
var ErrInvalid = errors.New("invalid job")

// Limits of one worker.
type Limits struct {
	Queue       int           // jobs waiting in each direction; full is ErrBusy
	QueueBlocks int           // blocks of those jobs together; more is ErrBusy too, which bounds a queue in bytes
	BatchBytes  int64         // bytes of one copy given to the device; loads wait for at most one save of that size
	Batches     int           // of a job that the device has at once, so that it has the next when one ends
	EventWait   time.Duration // longest wait for a job's event and step word
	SaveAge     time.Duration // a save that has waited this long precedes loads
	SampleWait  time.Duration // longest time to sum a sample, at most cudaipc.MaxSampleWait
	PollFloor   time.Duration // shortest pause between two polls of an event
	PollCeiling time.Duration // longest pause between two polls of an event
}

// DefaultLimits are an agent's limits by default.
var DefaultLimits = Limits{
	Queue: 1024, QueueBlocks: 1 << 18, BatchBytes: 16 << 20, Batches: 8, EventWait: 60 * time.Second,
	SaveAge:    50 * time.Millisecond,
	SampleWait: 250 * time.Millisecond,
	PollFloor:  20 * time.Microsecond, PollCeiling: 500 * time.Microsecond,
}

// Slots is the pool as a worker uses it.
type Slots interface {
	pool.Slots
	Epoch(s pool.SpaceID) uint32
}

// Config configures a worker.
type Config struct {
	Peer      cudaipc.Peer
	Slots     Slots
	Space     pool.SpaceID
	Spec      pool.Spec
	Held      []Held // at least one shard; all have the same blocks
	Integrity Integrity
	Sampling  Sampling
	Lanes     *Lanes // shared by all workers of a device
	// Pacer, shared by a device's workers, limits saves that can be revoked; nil: no limit.
	Pacer *pace.Pacer
	// Awaited reports whether somebody waits for the saves, which are then not limited; may be nil.
	Awaited func() bool
	// Refusable: what is saved is for memory alone, which may refuse blocks that nobody waits for.
	Refusable bool
	// Owner returns the owner of the blocks that the worker stores; nil: they have none.
	Owner  func() pool.Owner
	Limits Limits
	// Complete is called from the worker's threads, Cancel and Close, never under a lock. It must
	// not block.
	Complete func(Completion)
}

// Held is a shard that a worker holds, and where its blocks lie.
type Held struct {
	Shard  uint8
	Layout Layout
}

// Integrity is the level at which loads are checked.
type Integrity uint8

// The levels. Header compares keys, epochs and whose a slot is; Full also a checksum made at the
// save.
const (
	Full Integrity = iota
	Header
)

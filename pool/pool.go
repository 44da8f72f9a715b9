// Package pool defines what a stored block is (its key, its space, its shards) and the interfaces
// through which blocks are stored. Of the module it imports the checksum alone; the packages below
// it implement storage.
package pool

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"

	"github.com/kvagent/kvagent/crc32c"
)

// Limits are part of the contract: a request beyond one is refused with an error that names it.
const (
	MaxHashLen = 32      // bytes of one block hash
	MaxGroups  = 16      // KV cache groups of one space
	MaxShards  = 256     // shards of one space: ranks' parts or cells
	MaxSpaces  = 1 << 16 // spaces open at once

	MaxOwners    = 255 // owners of entries that a pool distinguishes
	MaxOwnerName = 128 // bytes of an owner's name
)

// Fingerprint names a space: the first 16 bytes of the SHA-256 of its canonical identity.
type Fingerprint [16]byte

// Owner is the number of an owner of entries in a pool, 1 to MaxOwners; 0: nobody.
type Owner uint16

// SpaceID names a space opened in this process. IDs count up from 0 and are never reused.
type SpaceID uint32

// Spec describes a space: everything besides the block hash that changes a block's bytes.
type Spec struct {
	Fingerprint Fingerprint
	Identity    []byte  // the canonical identity that the fingerprint was made of; stored and compared
	Groups      []Group // index is the group's number
	Shards      int     // shards of every entry, 1 to MaxShards
	FirstEpoch  uint32  // epoch of the space when this opens it; 0 counts as 1; not compared
	Private     bool    // no other engine has this identity: its blocks are in memory alone; not compared
}

// EpochMarkers is the space of the markers of resets in shared stores. No engine's space has this
// fingerprint, and a store that lets values expire keeps those of this space.
var EpochMarkers = func() Fingerprint {
	sum := sha256.Sum256([]byte("kvagent: markers of tier epochs"))
	return Fingerprint(sum[:16])
}()

// OpeningEpoch returns the epoch that a space begins with.
func (s *Spec) OpeningEpoch() uint32 { return max(s.FirstEpoch, 1) }

// Group is one KV cache group of a space.
type Group struct {
	BlockTokens uint32   // tokens of one block
	ShardBytes  []uint32 // bytes of one block, per shard; len is Spec.Shards
}

// Key names one block in every process and on every node. Without the shard it names an entry.
type Key struct {
	Space Fingerprint
	Group uint8
	Shard uint8
	Hash  Hash
}

// Hash is one block hash of the engine: opaque, 1 to MaxHashLen bytes, zero-padded.
type Hash struct {
	Len   uint8
	Bytes [MaxHashLen]byte
}

// MakeHash copies b, which must have 1 to MaxHashLen bytes.
func MakeHash(b []byte) (h Hash) {
	h.Len = uint8(copy(h.Bytes[:], b))
	return h
}

// Seed returns the CRC-32C state that a content checksum starts from. It binds the checksum to the
// key and the length: the same bytes under another key have another sum.
func (k *Key) Seed(length uint32) uint32 {
	var b [16 + 1 + 1 + 1 + MaxHashLen + 4]byte
	copy(b[:16], k.Space[:])
	b[16], b[17], b[18] = k.Group, k.Shard, k.Hash.Len
	copy(b[19:], k.Hash.Bytes[:])
	binary.LittleEndian.PutUint32(b[19+MaxHashLen:], length)
	return crc32c.Update(0, b[:])
}

// Sum continues a content checksum over p: Sum(k.Seed(n), p) is the checksum of p stored under k,
// and Sum(Sum(s, a), b) is Sum(s, ab).
func Sum(state uint32, p []byte) uint32 { return crc32c.Update(state, p) }

// Hashes is a view of a chain of block hashes of equal length that lie next to each other in Blob.
// Hash i of the view is number First+i*Step of the blob. The view does not own Blob.
type Hashes struct {
	Blob        []byte
	Len         int // bytes of one hash, 1 to MaxHashLen
	First, Step int // Step 0 counts as 1
	N           int // hashes in the view
}

// Chain returns the view of all whole hashes of length n in blob.
func Chain(blob []byte, n int) Hashes { return Hashes{Blob: blob, Len: n, Step: 1, N: len(blob) / n} }

// At returns hash i, 0 <= i < N, as a slice of Blob.
func (h *Hashes) At(i int) []byte {
	step := h.Step
	if step == 0 {
		step = 1
	}
	o := (h.First + i*step) * h.Len
	return h.Blob[o : o+h.Len : o+h.Len]
}

// Slice returns the view of hashes from to to-1.
func (h Hashes) Slice(from, to int) Hashes {
	if h.Step == 0 {
		h.Step = 1
	}
	h.First += from * h.Step
	h.N = to - from
	return h
}

// Status is the result for one block. The numbers are those of the session protocol
// (docs/PROTOCOL.md).
type Status uint8

// Statuses that a pool returns. Package transfer defines those from 16 on.
const (
	OK         Status = 0 // stored, or found and delivered
	Exists     Status = 1 // save: already stored, nothing to do
	InProgress Status = 2 // save: another job is storing it now
	Busy       Status = 3 // no slot could be freed, or a queue is full; try again later
	Stale      Status = 4 // the weights epoch is over
	Missing    Status = 5 // load: not stored
	Corrupt    Status = 6 // load: the header or the checksum did not match; the entry is dropped
	Invalid    Status = 7 // no such space, group, shard or block, or a wrong length
	Unwanted   Status = 8 // save: worth less than all that is stored; not to be offered again
)

// Errors to branch on.
var (
	ErrIdentity = errors.New("two identities with one fingerprint, or one identity with different shapes")
	ErrTooLarge = errors.New("larger than the pool can hold")
	ErrClosed   = errors.New("pool closed")
)

// Ref names one entry of a pool while a pin or a reservation holds it. The highest bit marks
// promises (see Tiers); a memory leaves it clear.
type Ref uint64

// Index finds stored entries. An entry is visible once all its shards are committed; Index sees
// only visible ones. All methods may run concurrently, wait for nothing but memory while they hold
// a lock, and never block on a device or another process.
type Index interface {
	// Prefix returns the number of leading hashes that are stored, and marks these blocks as used:
	// afterwards each is at least as recent as those after it in the chain.
	Prefix(s SpaceID, group uint8, h Hashes) int
	// Exists sets present[i] for each hash, and does not count as a use. len(present) is h.N.
	Exists(s SpaceID, group uint8, h Hashes, present []bool)
	// Pin is Prefix that also pins the entries it counts, while all their shards together stay
	// within maxBytes, and appends their refs. A pinned entry is not evicted and its slots are not
	// reused, even if it is dropped meanwhile (it is only no longer found). Pin returns the number
	// of entries pinned, the extended refs, and the bytes pinned.
	Pin(s SpaceID, group uint8, h Hashes, maxBytes int64, refs []Ref) (n int, all []Ref, bytes int64)
	// Unpin ends each of the pins once. It ignores what is none.
	Unpin(refs []Ref)
}

// Slot is a shard's place in the arena, held by a reservation (to be written) or a pin (to be
// read).
type Slot struct {
	Ref   Ref
	Off   int64  // offset in the arena, bytes
	Len   uint32 // bytes of the shard
	Sum   uint32 // content checksum: set by the writer before Commit, returned by Acquire
	Shard uint8
}

// Batch names the shards of a run of chained blocks, and carries the result for each. The caller
// owns Status and Slots, which have the length Hashes.N; Slots[i] is valid where Status[i] is OK.
type Batch struct {
	Space  SpaceID
	Group  uint8
	Shard  uint8
	Epoch  uint32 // Reserve: the weights epoch in which the bytes were computed
	Parent []byte // Reserve: hash of the block before the first; empty at the start of a prompt
	Owner  Owner  // Reserve: the owner of the entries that it makes; see Memory
	// Refusable: Reserve may answer Unwanted, because nothing but the memory is to have the blocks,
	// and nobody waits for them.
	Refusable bool
	Hashes    Hashes
	Status    []Status
	Slots     []Slot
}

// Slots is how a transfer writes and reads the pool. Each batch is decided in one step. The caller
// copies the bytes outside of it, while the reservation or the pin holds the slot.
type Slots interface {
	// Reserve allocates a slot for each shard that is neither stored (Exists) nor being written
	// (InProgress), evicting as necessary. The status is Busy where nothing more can be evicted,
	// Stale if Epoch is not the space's, and Unwanted from the first block on that is Refusable
	// and that the policy refuses.
	Reserve(b *Batch)
	// Commit ends reservations. A slot whose status is OK is committed with its Sum; any other is
	// freed. A slot whose entry was dropped or whose epoch has passed is freed and its status
	// becomes Stale.
	Commit(slots []Slot, epoch uint32, status []Status)
	// Acquire pins visible entries and returns the slot of the shard; Missing where there is none.
	// It compares the whole key, the epoch included, and whose the slot is. It is no use: the
	// look-up was.
	Acquire(b *Batch)
	// Release ends the pins of Acquire. An entry whose status is Corrupt is dropped.
	Release(slots []Slot, status []Status)
	// Probe reads a byte of every page of a slot of which a copy failed or faulted, and reports
	// whether all could be read. The caller holds the slot by a reservation or a pin, and ends that
	// as usual. A page that cannot be read is retired: entries on it are dropped at once, and no
	// slot of its slab is allocated again.
	Probe(s Slot) bool
}

// Spaces administers a pool.
type Spaces interface {
	// OpenSpace returns the ID of a space, which it opens if necessary, and retains the spec. Equal
	// specs have equal IDs until the space is closed.
	OpenSpace(s Spec) (SpaceID, error)
	// ResetSpace starts the next weights epoch of a space; entries of older epochs are not found
	// from then on. Its time does not depend on what is stored: Sweep frees the memory.
	ResetSpace(s SpaceID) (epoch uint32, err error)
	// CloseSpace closes a space and drops what is stored of it, as ResetSpace does. Its ID is
	// invalid from then on. If the same spec is opened again, it has another ID and begins with the
	// epoch of that spec.
	CloseSpace(s SpaceID) error
	// Sweep frees the memory of what was reset or closed before the call; memory held by pins and
	// reservations is freed when they end. It works in slices, so other methods are not delayed.
	// Until it is swept, that memory counts as used and can be evicted like any other.
	Sweep()
	// Epoch returns the current epoch of a space.
	Epoch(s SpaceID) uint32
	// SetPressure sets the function that is called, without any lock held, when a reservation finds
	// everything pinned. If f ends some pins it returns true, and the reservation is retried once.
	SetPressure(f func(need int64) bool)
	// Stats returns a consistent snapshot.
	Stats() Stats
}

// Stats are the state and counters of a pool. Bytes are bytes of slots, after rounding up.
type Stats struct {
	Capacity      int64        `json:"capacity_bytes" metric:"pool_capacity_bytes"`
	Used          int64        `json:"used_bytes" metric:"pool_used_bytes"`
	Pinned        int64        `json:"pinned_bytes" metric:"pool_pinned_bytes"`
	Ready         int64        `json:"ready_bytes"`                   // what has been populated
	Entries       int64        `json:"entries" metric:"pool_entries"` // visible
	Partial       int64        `json:"entries_partial"`               // they lack shards
	PinnedEntries int64        `json:"entries_pinned"`
	Evicted       uint64       `json:"evicted" metric:"pool_evicted_total"` // entries
	EvictedBytes  uint64       `json:"evicted_bytes"`
	Dropped       uint64       `json:"dropped" metric:"pool_dropped_total"` // as corrupt, or by a reset
	Reassigned    uint64       `json:"slabs_reassigned"`                    // given to another class
	Busy          uint64       `json:"busy"`                                // reservations refused
	Bad           BadMemory    `json:"bad"`
	Classes       []ClassStats `json:"classes"`
	Policy        PolicyReport `json:"eviction"`
	Owners        OwnersStats  `json:"owners"`
	// FileFull counts the times that the pool's file could not grow: its file system was full.
	FileFull uint64 `json:"file_full" metric:"pool_file_faults_total{fault=full}"`
}

// OwnersStats are those of all owners. The totals include owners that are no longer in the table.
type OwnersStats struct {
	// Evicted are entries, because of a budget; also in Stats.Evicted.
	Evicted uint64 `json:"evicted" metric:"pool_budget_total{result=evicted}"`
	// Refused are reservations, because of a budget; not in Stats.Busy.
	Refused uint64       `json:"refused" metric:"pool_budget_total{result=refused}"`
	Each    []OwnerStats `json:"list"` // those that are open or have entries
}

// OwnerStats are the state and counters of one owner.
type OwnerStats struct {
	Name         string `json:"name" label:"owner"` // of an engine: its instance
	Open         bool   `json:"open"`
	Bytes        int64  `json:"bytes" metric:"pool_owner_bytes"`               // of its entries' slots
	Budget       int64  `json:"budget_bytes" metric:"pool_owner_budget_bytes"` // their limit, 0: none
	Evicted      uint64 `json:"evicted"`
	EvictedBytes uint64 `json:"evicted_bytes"`
	Refused      uint64 `json:"refused"`
}

// ClassStats is the use of one slot size.
type ClassStats struct {
	SlotBytes int64 `json:"slot_bytes"`
	Slabs     int   `json:"slabs"` // held
	Slots     int   `json:"slots"` // in those slabs
	Used      int   `json:"used"`  // slots
}

// BadMemory is the memory that a pool lost to pages that cannot be read.
type BadMemory struct {
	Pages    int64  `json:"pages" metric:"pool_bad_pages"` // retired
	MaxPages int64  `json:"pages_limit"`                   // of a healthy pool; 0: it has no such limits
	Bytes    int64  `json:"bytes"`                         // no longer allocated
	MaxBytes int64  `json:"bytes_limit"`                   // of a healthy pool
	Dropped  uint64 `json:"dropped"`                       // entries, because of it
	// Faults counts failed accesses to pages of the pool's file outside the arena.
	Faults uint64 `json:"file_faults" metric:"pool_file_faults_total{fault=page}"`
}

// Healthy reports whether the retired memory is below both limits.
func (b *BadMemory) Healthy() bool {
	return b.MaxPages == 0 || b.Pages < b.MaxPages && b.Bytes < b.MaxBytes
}

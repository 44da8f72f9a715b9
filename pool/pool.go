// Package pool says what a stored block is: its key, its space, its shards, and the seams behind
// which blocks are kept. It is a leaf. Everything else about storing them lives in the packages
// below it.
package pool

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
)

// Limits. Each is part of the contract: what is beyond one is refused with an error that names it.
const (
	MaxHashLen = 32      // bytes of one block hash
	MaxGroups  = 16      // KV cache groups of one space
	MaxShards  = 16      // shards (ranks with different KV) of one space
	MaxSpaces  = 1 << 16 // spaces open at once
)

// Fingerprint names a space: the first 16 bytes of the SHA-256 of its canonical identity.
type Fingerprint [16]byte

// SpaceID is a space opened in this process: they count up from 0, and none is used again while the
// process lives.
type SpaceID uint32

// Spec describes a space: everything besides the block hash that changes a block's bytes.
type Spec struct {
	Fingerprint Fingerprint
	Identity    []byte  // the canonical identity the fingerprint was made of; kept and compared
	Groups      []Group // index is the group's number
	Shards      int     // shards of every entry, 1 to MaxShards
	FirstEpoch  uint32  // of the space when this opens it; 0 counts as 1. It is not compared
}

// OpeningEpoch is the epoch that a space begins with.
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

// Hash is one block hash of the engine: opaque, 1 to MaxHashLen bytes, zero behind its length.
type Hash struct {
	Len   uint8
	Bytes [MaxHashLen]byte
}

// MakeHash copies b, which must have 1 to MaxHashLen bytes.
func MakeHash(b []byte) (h Hash) {
	h.Len = uint8(copy(h.Bytes[:], b))
	return h
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Seed is the CRC-32C state a content checksum starts from, so that the checksum is bound to the
// key and the length: the same bytes under another key have another sum.
func (k *Key) Seed(length uint32) uint32 {
	var b [16 + 1 + 1 + 1 + MaxHashLen + 4]byte
	copy(b[:16], k.Space[:])
	b[16], b[17], b[18] = k.Group, k.Shard, k.Hash.Len
	copy(b[19:], k.Hash.Bytes[:])
	binary.LittleEndian.PutUint32(b[19+MaxHashLen:], length)
	return crc32.Update(0, castagnoli, b[:])
}

// Sum continues a content checksum over p: Sum(k.Seed(n), p) is the checksum of p stored under k,
// and Sum(Sum(s, a), b) is Sum(s, ab).
func Sum(state uint32, p []byte) uint32 { return crc32.Update(state, castagnoli, p) }

// Hashes is a view of a chain of block hashes of equal length that lie one behind the other in
// Blob. Hash i of the view is number First+i*Step of the blob. It does not own Blob.
type Hashes struct {
	Blob        []byte
	Len         int // bytes of one hash, 1 to MaxHashLen
	First, Step int // Step 0 counts as 1
	N           int // hashes in the view
}

// Chain is the plain view of all hashes of length n in blob; what is left over of blob is not in
// it.
func Chain(blob []byte, n int) Hashes { return Hashes{Blob: blob, Len: n, Step: 1, N: len(blob) / n} }

// At is hash i, 0 <= i < N, as a slice of Blob.
func (h *Hashes) At(i int) []byte {
	step := h.Step
	if step == 0 {
		step = 1
	}
	o := (h.First + i*step) * h.Len
	return h.Blob[o : o+h.Len : o+h.Len]
}

// Slice is the view of hashes from to to-1.
func (h Hashes) Slice(from, to int) Hashes {
	if h.Step == 0 {
		h.Step = 1
	}
	h.First += from * h.Step
	h.N = to - from
	return h
}

// Status is what became of one block. The numbers are those of the session protocol
// (docs/PROTOCOL.md).
type Status uint8

// The statuses a pool gives. Those from 16 on are given by package transfer.
const (
	OK         Status = 0 // stored, or found and delivered
	Exists     Status = 1 // save: already stored, nothing to do
	InProgress Status = 2 // save: being stored by someone else right now
	Busy       Status = 3 // no slot could be freed, or a queue is full; try again later
	Stale      Status = 4 // the weights epoch is over
	Missing    Status = 5 // load: not stored
	Corrupt    Status = 6 // load: the header or the checksum did not fit; the entry is dropped
	Invalid    Status = 7 // no such space, group, shard or block, or a wrong length
)

// Errors to branch on.
var (
	ErrIdentity = errors.New("two identities with one fingerprint, or one identity with different shapes")
	ErrTooLarge = errors.New("larger than the pool can hold")
	ErrClosed   = errors.New("pool closed")
)

// Ref names one entry of a pool for as long as a pin or a reservation holds it. The highest bit is
// that of promises, see Tiers: a memory leaves it clear.
type Ref uint64

// Index answers what is stored. Entries are visible when all their shards are committed; only
// visible ones are seen here. All methods may run at once, hold no lock while they wait for
// anything but memory, and never block on a device or another process.
type Index interface {
	// Prefix is the number of leading hashes that are stored, and marks the chain as used:
	// afterwards each of its blocks is at least as recent as the blocks behind it.
	Prefix(s SpaceID, group uint8, h Hashes) int
	// Exists sets present[i] for each hash, and marks nothing as used. len(present) is h.N.
	Exists(s SpaceID, group uint8, h Hashes, present []bool)
	// Pin is Prefix that also pins the entries it counts, as long as all their shards together stay
	// within maxBytes, and appends their refs. A pinned entry is neither evicted nor are its slots
	// used again, also when it is dropped meanwhile (then it is only no longer found). Returns the
	// count pinned, the refs extended, and the bytes pinned.
	Pin(s SpaceID, group uint8, h Hashes, maxBytes int64, refs []Ref) (n int, all []Ref, bytes int64)
	// Unpin takes each pin back once.
	Unpin(refs []Ref)
}

// Slot is a shard's place in the arena, held by a reservation (to be written) or a pin (to be
// read).
type Slot struct {
	Ref   Ref
	Off   int64  // offset in the arena, bytes
	Len   uint32 // bytes of the shard
	Sum   uint32 // content checksum: set by the writer before Commit, given to the reader by Acquire
	Shard uint8
}

// Batch names the shards of a run of chained blocks, and carries the result for each.
// Status and Slots are the caller's, of length Hashes.N; Slots[i] is valid where Status[i] is OK.
type Batch struct {
	Space  SpaceID
	Group  uint8
	Shard  uint8
	Epoch  uint32 // Reserve: the weights epoch the bytes were computed in
	Parent []byte // Reserve: hash of the block before the first; empty at the start of a prompt
	Hashes Hashes
	Status []Status
	Slots  []Slot
}

// Slots is how a transfer fills and reads the pool. A batch is decided in one step; bytes are
// copied outside of it, by the caller, while reservation or pin hold the slot.
type Slots interface {
	// Reserve gives a slot for each shard that is neither stored (Exists) nor being written
	// (InProgress). It evicts what it must; Busy where nothing more can go. Stale if Epoch is not
	// the space's.
	Reserve(b *Batch)
	// Peek says for each shard what Reserve would find, and changes nothing: Exists, InProgress, or
	// OK where it would need a slot; Invalid and Stale as Reserve. It leaves b.Slots alone.
	Peek(b *Batch)
	// Commit ends reservations: a slot whose status is OK is committed with its Sum, any other is
	// given up. A slot whose entry was dropped or whose epoch has passed is given up and its status
	// becomes Stale.
	Commit(slots []Slot, epoch uint32, status []Status)
	// Acquire pins visible entries and gives the shard's slot; Missing where there is none. The
	// header (key, generation, length) is compared on the way.
	Acquire(b *Batch)
	// Release takes the pins of Acquire back. An entry whose status is Corrupt is dropped.
	Release(slots []Slot, status []Status)
}

// Spaces is the administration of a pool.
type Spaces interface {
	// OpenSpace gives the id of a space, opening it at first. Equal specs give equal ids until the
	// space is closed.
	OpenSpace(s Spec) (SpaceID, error)
	// ResetSpace starts a new weights epoch, the next number, and from then on no entry of an older
	// one is found. It takes as long whatever is stored: the memory comes back by Sweep.
	ResetSpace(s SpaceID) (epoch uint32, err error)
	// CloseSpace forgets a space and what is stored of it, as ResetSpace does; its id stands for
	// nothing any more. The same spec opened later has another id, and begins with the epoch that
	// the spec says then.
	CloseSpace(s SpaceID) error
	// Sweep gives the memory of what was reset or closed before the call back, but for what pins
	// and reservations hold: that comes when they end. It works in slices, so that the pool's other
	// methods go on meanwhile. Until then that memory counts as used, and goes like any other when
	// room is needed.
	Sweep()
	// Epoch is the current epoch of a space.
	Epoch(s SpaceID) uint32
	// SetPressure names the function that is called, without any lock held, when a reservation
	// finds everything pinned: it may give pins back and then says true, and the reservation looks
	// once more.
	SetPressure(f func(need int64) bool)
	// Stats is a consistent snapshot.
	Stats() Stats
}

// Stats of a pool. Bytes are bytes of slots, rounded up as they are stored.
type Stats struct {
	Capacity, Used, Pinned, Ready   int64  // bytes; Ready is what is populated so far
	Entries, Partial, PinnedEntries int64  // Entries are visible, Partial lack shards
	IndexBytes                      int64  // memory of index, headers and slot table in use
	Evicted, Dropped, Reassigned    uint64 // entries evicted, dropped as corrupt or reset; slabs given to another class
	EvictedBytes                    uint64 // of the entries evicted
	Moved, MovedBytes               uint64 // slots copied to others, so that a slab could change its class; bytes of these slots
	Busy                            uint64 // reservations refused
	FileFull                        uint64 // times the pool's file could not grow: no room in its file system
	Bad                             BadMemory
	Classes                         []ClassStats
	Policy                          PolicyReport
}

// ClassStats is one slot size.
type ClassStats struct {
	SlotBytes   int64
	Slabs, Used int // slabs held, slots used
	Slots       int // slots in those slabs
}

// BadMemory is what a pool lost of its memory to pages that cannot be read.
type BadMemory struct {
	Pages    int64  // retired
	MaxPages int64  // from this number on the pool is not healthy; 0: it has no such limits
	Bytes    int64  // that are not given out any more
	MaxBytes int64  // from this number on the pool is not healthy
	Dropped  uint64 // entries dropped for it
	Faults   uint64 // times that a page of the pool's file beside the arena could not be read or written
}

// Healthy reports whether less is retired than the pool bears.
func (b *BadMemory) Healthy() bool {
	return b.MaxPages == 0 || b.Pages < b.MaxPages && b.Bytes < b.MaxBytes
}

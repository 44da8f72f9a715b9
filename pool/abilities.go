package pool

import (
	"context"
	"errors"
	"time"
)

// Abilities are what a pool, a store or an eviction policy may have besides its contract (Index,
// Slots and Spaces; Store; Policy). They are found by type assertion where they are used, and a
// wrapper that does not forward one hides it. All of them are in this file; each says which
// implementations have it and what is lost without it, and those assert it at compile time.
// In the same way a transfer.Worker looks whether its Slots are Spaces too: only then it notices
// jobs of an epoch that is over.

// Abilities of a pool.

// Tiers is what a pool that has tiers below its memory can do besides. Through its Index an entry
// of a tier that is known to be there is stored like one in memory: Prefix and Exists count it, and
// Pin promises it. A promise is a Ref like a pin: the entry is being brought to memory, and is
// pinned there once it came. Unpin ends it, whatever became of it.
//
// Has it: pool/tier. Without it: the pool is memory alone: what it evicts is lost, look-ups wait
// for no tier, and a load is never held.
type Tiers interface {
	// Ask finds out what the tiers have of the chains, where that is not known, and waits for it
	// until the deadline at most. It says whether some tier is still asked then: what it answers
	// will be known to a later call.
	Ask(s SpaceID, asked []Asked, deadline time.Time) (pending bool)
	// Settle calls then, once, from any goroutine and maybe before it returns, when no ref is a
	// promise that is still open: each entry is pinned in memory, or did not come and Acquire will
	// find it Missing. It does not keep refs. cancel makes sure that then is not called any more,
	// and says whether it had not been.
	Settle(refs []Ref, then func()) (cancel func() bool)
	// Hint takes pins back like Unpin, but what they promised comes nevertheless, as far as it has
	// room: a probe found it, and who probes will come again.
	Hint(refs []Ref)
	// Computed tells that an engine of a space computed so many tokens of prompts in one step, and
	// how long that took: what tells whether it is worth its time to bring a block up.
	Computed(s SpaceID, tokens int, took time.Duration)
	// Report is what each tier is and did, the nearest first, for people and metrics.
	Report() TierReport
}

// TierContents is what Tiers can do besides, for people: what one tier holds, and removing it from
// that tier alone. It asks the store whatever state the tier is in, until ctx ends.
//
// Has it: pool/tier. Without it: `kvagent cache tier` finds no tier.
type TierContents interface {
	// StoredAs is the name of a space in the tiers: its fingerprint, or another one after a reset
	// on this node.
	StoredAs(space Fingerprint) Fingerprint
	// ListTier is Lister.List of the named tier; keys have the names that spaces have there.
	ListTier(ctx context.Context, tier string, found func(k Key, bytes int64) bool) error
	// DeleteIn is Store.Delete of such keys in the named tier.
	DeleteIn(ctx context.Context, tier string, keys []Key) error
}

// Errors of TierContents.
var (
	ErrNoTier   = errors.New("no such tier")
	ErrUnlisted = errors.New("this tier's store does not list what it holds")
)

// SpaceUse is what Tiers can do besides: hear which spaces engines use, and tell of resets that
// came from other nodes. None of its methods waits for a disk or a store.
//
// Has it: pool/tier.
// Without it: there is nothing to collect, and no other node whose resets count here.
type SpaceUse interface {
	// InUse tells that an engine of a space is here, and which kind of generation its identity has.
	// What tiers have of a private one is collected a named time after NotInUse, unless InUse comes
	// before; of a named one, when no node has used it for a named time.
	InUse(f Fingerprint, g Generation)
	// NotInUse tells that the last engine of a space is gone.
	NotInUse(f Fingerprint)
	// OnAdopted names the function that is called, without any lock held, when a space that is open
	// got a new epoch because of a reset on another node; nil: nobody is.
	OnAdopted(then func(f Fingerprint))
}

// Forgetter is an optional form of a pool that outlives its process: it may hold entries of a space
// that nobody opened yet in this life.
//
// Has it: pool/dram (its file outlives the process), pool/tier (which passes it on). Without it:
// nothing is kept of a space that is not open, so there is nothing to forget.
type Forgetter interface {
	// Forget makes sure that nothing stored so far of a space is found when it is opened, now or in
	// another life. When it returns nil that is certain. A space that is open is reset; one that is
	// not known is no error.
	Forget(f Fingerprint) error
}

// SpaceCounter is what a memory can do besides: count the entries of one space, 0 if it is not
// open.
//
// Has it: pool/dram, pool/tier (of its memory). Without it: `kvagent cache` shows no number of
// blocks, and an unused space is closed only when its place is needed.
type SpaceCounter interface {
	SpaceEntries(s SpaceID) int64
}

// WriteBack is what a memory can do besides, for a stack that writes what is about to go.
//
// Has it: pool/dram.
// Without it: no tier can be written only with what is about to go, and a write to a tier counts as
// a use of the block.
type WriteBack interface {
	// Coldest fills out with entries that may go next and are held by nobody, and says how many:
	// those that were not used for longest, about in their order, and where others may go as well
	// some of these, so that many calls name all. What is stored, and in which order it goes, stays
	// as it is.
	Coldest(out []Cold) int
	// ReadWithoutTouch is Acquire of each entry, read, and Release with the status that read gives, one entry
	// after the other, without counting as a use: what nobody else used meanwhile is as near to its
	// eviction as before. No lock is held while read runs.
	ReadWithoutTouch(b *Batch, read func(s Slot) Status)
}

// Prober is an optional form of Slots whose memory may have pages that went bad.
//
// Has it: pool/dram, pool/tier (which asks its memory).
// Without it: a page that goes bad fails each copy that meets it, and is never retired.
type Prober interface {
	// Probe reads a byte of every page of a slot that the caller holds by a reservation or a pin,
	// and reports whether all pages could be read. It is for a slot of which a copy failed, or
	// faulted. A page that cannot be read is retired: what is stored in it is dropped at once, and
	// no slot that overlaps it is given out again. The caller ends its reservation or pin as ever.
	Probe(s Slot) bool
}

// Mapped is a pool whose slots lie in memory that this process has mapped.
//
// Has it: pool/dram, pool/mem, pool/tier (its memory's). Without it: no block can be checked end to
// end, so that Config.VerifySample of an agent must be 0.
type Mapped interface {
	// Arena returns the memory, and a descriptor with which another process can map it. Both stay
	// the pool's.
	Arena() (base []byte, fd int)
}

// Abilities of a store.

// Lister is what a Store can do besides: name what it holds. It is slow, and for administration.
//
// Has it: pool/disk, pool/redis, pool/s3. Without it: `kvagent cache tier` does not list the tier;
// without SpaceLister too, what nobody uses any more is not collected there.
type Lister interface {
	// List calls found for every shard, until it gives false. What comes or goes meanwhile may be
	// named, or not, or twice.
	List(ctx context.Context, found func(k Key, bytes int64) bool) error
}

// SpaceLister is what a Store can do besides: List of some spaces alone.
//
// Has it: pool/disk, pool/redis, pool/s3.
// Without it: List looks at everything, and its caller picks.
type SpaceLister interface {
	// ListSpaces calls found for every shard of the spaces. Now and then it calls looked with the
	// number of keys it has looked at since the last call, holding nothing that others wait for:
	// looked may take its time, and calls the store itself. An error of looked ends the list, and
	// is its error.
	ListSpaces(
		ctx context.Context, spaces []Fingerprint, looked func(n int) error, found func(k Key, bytes int64),
	) error
}

// Reporter is what a Store can do besides: say how it is, at any time and without waiting for
// anybody.
//
// Has it: pool/disk, pool/mooncake, pool/redis, pool/s3. Without it: status shows no state of the
// store, and /metrics none of its counts.
type Reporter interface {
	Report() StoreReport
}

// Abilities of an eviction policy.

// MaxLearned bounds what a Learner gives, in bytes.
const MaxLearned = 1 << 20

// Learner is a Policy that can hand on what it learned to the one that follows after a restart. A
// pool that outlives its process asks for it now and then and at its end, and keeps the bytes as
// they are.
//
// Has it: pool/evict.Hazard. Without it: the policy learns anew after each restart.
type Learner interface {
	// Learned is what the policy knows now: at most MaxLearned bytes, with a version and a checksum
	// of their own. It says nothing of single entries, so it may be older than they are.
	Learned() []byte
	// Learn takes it over, best before the first Insert. On an error (damage, another version)
	// nothing has changed: the policy learns anew.
	Learn(learned []byte) error
}

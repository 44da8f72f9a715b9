package pool

import (
	"time"
)

// Memory is the pool of a node: the memory, whose slots this process has mapped, or a stack of
// tiers on it. Pools that outlive their process have entries of spaces that were not opened in it.
//
// Implemented by pool/dram, and by pool/tier, which embeds that.
type Memory interface {
	Index
	Slots
	Spaces
	Advised
	Journal

	// Forget guarantees, once it returns nil, that nothing stored so far of a space is found when
	// the space is opened, in this process or a later one. It resets an open space. An unknown
	// space is no error.
	Forget(f Fingerprint) error
	// SpaceEntries counts the entries of one space in memory.
	SpaceEntries(s SpaceID) int64
	// Arena returns the memory, and a descriptor from which another process can map it. Both remain
	// the pool's.
	Arena() (base []byte, fd int)

	// An entry belongs to the Owner of the Batch that made it, as long as it is in memory, whoever
	// stores it again. What a tier or another node brings belongs to nobody, as does what an
	// earlier process stored.

	// OpenOwner returns the owner with a name of 1 to MaxOwnerName bytes. It stays that name's
	// until as many calls of CloseOwner. Afterwards it does too, with its entries, as long as there
	// are fewer than MaxOwners others.
	OpenOwner(name string) (Owner, error)
	// CloseOwner ends one OpenOwner.
	CloseOwner(o Owner)
	// SetBudget limits the bytes of an owner's entries; 0: no limit. At the limit, Reserve evicts
	// the owner's least recently used entries, a suffix before its prefix. If those are held or
	// have children of other owners, or if it would take too long to find one, the status is Busy,
	// and nothing else is evicted for it.
	SetBudget(o Owner, bytes int64)
}

// Tiers is a Memory with tiers below it. Through its Index, an entry that is known to be in a
// tier counts as stored: Prefix and Exists count it, and Pin promises it. A promise is a Ref like a
// pin: the entry is being fetched to memory and is pinned there on arrival. Unpin ends it in any
// case.
//
// Implemented by pool/tier. The agent finds it by a type assertion: without it, the pool is memory
// alone, evicted entries are lost, look-ups wait for no tier, and a load is never held back.
type Tiers interface {
	// Ask queries the tiers for the chains where their content is not known yet, and waits until
	// the deadline at most. It reports whether some tier has not answered by then; a later call
	// finds that answer. anew: an answer from before the call that a shared tier lacks an entry
	// does not count, because another node is known to be writing it.
	Ask(s SpaceID, asked []Asked, deadline time.Time, anew bool) (pending bool)
	// Shared reports whether there is a shared tier that can be asked, or that may be soon: one
	// that has not answered for a moment is worth a short wait.
	Shared() bool
	// Settle calls then once, from another goroutine, when no ref is an open promise any more: each
	// entry is pinned in memory, or it failed to arrive and Acquire will return Missing. It does
	// not retain refs. cancel guarantees that then is not called afterwards, and reports
	// whether it prevented the call. It is nil if none is an open promise: then is not called.
	Settle(refs []Ref, then func()) (cancel func() bool)
	// Hint unpins like Unpin, but the promised blocks are still fetched if there is room: they came
	// from a probe, which the client will repeat.
	Hint(refs []Ref)
	// Fetched returns how many of refs were to be fetched from the node's own tiers when they were
	// pinned, and how many from shared ones. The others were in memory.
	Fetched(refs []Ref) (own, shared int)
	// Report returns the state and counters of each tier, the nearest first, for people and
	// metrics.
	Report() TierReport
	// OnAdopted sets the function that is called, without any lock held, when an open space gets a
	// new epoch because of a reset on another node; nil removes it.
	OnAdopted(then func(f Fingerprint))
	// Storage returns the journal of the stores of the node, of which it can tell which entries
	// come and go there; nil: there are none.
	Storage() Journal
}

// Advised is a memory that can be told how its entries will be used.
type Advised interface {
	// PinEach pins each of the hashes that is stored, without counting it as asked for, and appends
	// their refs; bytes is the size of one. Unlike Pin it goes on after one that is not stored.
	PinEach(s SpaceID, group uint8, h Hashes, refs []Ref) (all []Ref, bytes int64)
	// MarkUnused marks those of the hashes that are stored. A mark ends when the entry is used: by
	// a look-up that finds it, a pin, or a save of the same block. brief: it is for DropUnused.
	MarkUnused(s SpaceID, group uint8, h Hashes, brief bool)
	// CountUnused returns how many of the hashes are stored, and how many of those are still
	// marked; bytes is the size of one.
	CountUnused(s SpaceID, group uint8, h Hashes) (stored, unused int, bytes int64)
	// DropUnused drops those of the hashes that are still marked for it and not pinned, except by
	// Acquire alone: a tier may be reading them. An entry that others follow stays until a later
	// call has dropped them. It returns the number of those dropped, of earlier calls' hashes, too.
	DropUnused(s SpaceID, group uint8, h Hashes) int
	// Advise passes advice to the policy: a wish, with the time that it lasts, on the hashes,
	// stored or not; facts (time 0) on the entries before them in their chain, too. It sets the
	// advice's other fields.
	Advise(s SpaceID, group uint8, h Hashes, a Advice, lasts time.Duration)
}

// Change is the name of an entry that became visible, or that was and is not any more.
type Change struct {
	Space SpaceID
	Group uint8
	Hash  Hash
}

// Journal is a memory that notes which entries of some spaces come and go, for those who tell
// routers. A note says where to look, and Holds what is so.
type Journal interface {
	// Watch begins to note the entries of a space, until it is closed.
	Watch(s SpaceID)
	// Changed returns a channel of capacity 1 that has a value when there are notes.
	Changed() <-chan struct{}
	// Changes takes all notes, and keeps empty, the caller's last list, for the next ones. lost
	// reports that some could not be noted, or that a space was reset or closed: then any entry may
	// have come or gone.
	Changes(empty []Change) (all []Change, lost bool)
	// Holds is Index.Exists for memory alone, and reports whether the space is open.
	Holds(s SpaceID, group uint8, h Hashes, present []bool) (open bool)
}

// The rest of this file are abilities: optional interfaces of a store, beside its contract. Their
// users find them by type assertion, so a wrapper that does not forward one hides it. Each lists
// its implementations, which assert it at compile time, and the effect of its absence.

// KeyJournal is a Store that notes which keys come and go, and whose Exists answers from memory.
//
// Implemented by pool/disk. Without it, events do not tell of what the store holds.
type KeyJournal interface {
	// Watch begins to note all keys. signal is called when there are notes, under locks: it must
	// not wait, nor call the store.
	Watch(signal func())
	// Changes takes all notes, and keeps empty, the caller's last list, for the next ones. lost
	// reports that any key may have come or gone besides.
	Changes(empty []Key) (all []Key, lost bool)
}

// Reporter is a Store that reports its state at any time, without waiting.
//
// Implemented by pool/disk, pool/mooncake, pool/redis and pool/s3. Without it, /status shows no
// state of the store, and /metrics none of its counts.
type Reporter interface {
	Report() StoreReport
}

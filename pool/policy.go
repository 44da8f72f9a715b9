package pool

// MaxKinds bounds the kinds of entries a policy tells apart. Entries of one kind lie in slots of
// the same sizes, so that one makes room for another; all blocks of a chain are of one kind.
const MaxKinds = 64

// Policy says which entry goes when room is needed. It is pure: no lock, no clock, no goroutine;
// the pool calls it with its own lock held. Entries are small dense numbers that the pool gives,
// from 1 on, and gives again after Remove; 0 is none. What the policy knows of an entry's chain it
// reads through View, so the pool keeps that only once.
type Policy interface {
	// Access is one look-up of a chain. The policy keeps nothing of u.
	Access(u *Use)
	// Insert takes entries in, in the order of their chain; those it has already stay as they are.
	Insert(i *Insertion)
	// Remove forgets entries, evicted or dropped; those it does not have are passed over.
	Remove(entries []uint32)
	// Victim is the entry of one of the kinds (a bit each) that goes next, 0 if there is none or
	// the work allowed for one call found none. It has no child and is not held. It stays until
	// Remove.
	Victim(now int64, kinds uint64, v View) uint32
	// Report is for people and metrics. It allocates.
	Report() PolicyReport
}

// View is what a policy may ask of the pool while it looks for a victim.
type View interface {
	// Child is one of the entries, visible or being written, that hang on e; 0 if there is none.
	Child(e uint32) uint32
	// Held is true for an entry that is pinned, being written, or must stay for another reason.
	Held(e uint32) bool
}

// Use is a look-up as a policy sees it, which may be a little after it was. Told twice, it counts
// once.
type Use struct {
	Now         int64    // ns of a clock that never goes back
	BlockTokens uint32   // tokens of a block
	Prints      []uint64 // of all blocks of the chain, first to last; one or more
	Entries     []uint32 // of those in front that are stored. One that now has another print is passed over.
}

// Insertion is a run of blocks that were stored.
type Insertion struct {
	Now         int64 // ns, as in Use
	BlockTokens uint32
	Kind        uint8  // below MaxKinds
	Parent      uint32 // entry of the block before the first; 0 if it is not stored or there is none
	Entries     []uint32
	Prints      []uint64 // of each entry: a well-mixed hash of its key, the same whenever the same key comes again
}

// PolicyReport is what a policy says of itself.
type PolicyReport struct {
	Name    string
	Entries int   // entries it has
	Ghosts  int   // entries it remembers after they went
	Bytes   int64 // memory it holds

	// Beside the policy runs a shadow LRU with as much room. Zero for LRU itself.
	Lookups, Hits, ShadowHits uint64  // blocks looked up; hits of the policy; hits of LRU
	Margin                    float64 // blocks the policy may still fall behind before the alarm
	Missing                   int     // blocks that LRU would have and the policy gave up ...
	MayMiss                   float64 // ... and how many may be. Beyond, LRU decides
	Alarms                    uint64  // times it fell behind, forgot most of what it had learned, and let LRU decide
	Fallback                  bool    // after an alarm: for a while LRU decides
	LookupsDropped            uint64  // look-ups it was not told of, because too many were waiting

	Classes []PolicyClass
}

// PolicyClass is what a policy holds of blocks that are alike.
type PolicyClass struct {
	Name    string
	Entries int
	Evicted uint64
	// Worth is the hits that an entry gives per hour it is kept, as learned: right after a use, and
	// for the entry of the class that would go next (0 if it has none).
	Worth, WorthNext float64
}

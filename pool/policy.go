package pool

import (
	"encoding/binary"
	"math/bits"
	"time"
)

// MaxKinds bounds the kinds of entries that a policy distinguishes. Entries of one kind have slots
// of the same sizes, so evicting one makes room for another. All blocks of a chain are of one kind.
const MaxKinds = 64

// Advisor is a policy beside a pool, which tells it what happens and asks it for victims. The
// pool's lock is held in Insert, Remove, Victim and Class. Look-ups do not wait for it.
//
// Implemented by pool/advisor.
type Advisor interface {
	// Begin returns an empty note of a look-up, which End takes back and passes on.
	Begin() *Note
	End(n *Note)
	// CatchUp passes on the notes that wait, so that a reservation right after a look-up takes it
	// into account.
	CatchUp()
	// Insert passes on entries that became visible: fill describes the next run, all but its time,
	// and reports whether more follow.
	Insert(fill func(in *Insertion) (more bool))
	Remove(e uint32)
	// Victim returns the entry to evict next, of one of the kinds (a bit each), for a block with
	// this print, 0 for no certain one. It returns 0 if there is none, or if it found none within
	// the work allowed for one call, and Refused if that block is worth less than each of them.
	// The victim has no child and is not held. It stays until Remove.
	Victim(kinds, print uint64, v View) uint32
	Class(e uint32) string
	// Advise passes on advice, with the time that its wish lasts; 0: it has none.
	Advise(a *Advice, lasts time.Duration)
	Report() PolicyReport
	// Learned returns what the policy has learned, at most MaxLearned bytes, nil if that is
	// nothing; Learn takes over what it returned in an earlier process.
	Learned() []byte
	Learn(learned []byte) error
	// Close ends it. Nothing may be noted afterwards.
	Close()
}

// MaxLearned bounds what Advisor.Learned returns, in bytes.
const MaxLearned = 1 << 20

// MaxNoteBlocks bounds the leading blocks of one look-up that are noted, exceeded by a group at
// most.
const MaxNoteBlocks = 8 << 10

// Note is one look-up. Its owner is the look-up between Begin and End, then the advisor.
type Note struct {
	Use    Use
	ID     uint32 // of what the blocks have in common; the look-up's own
	Missed bool   // it ended at a block that is not stored
}

// Refused is no entry: Victim returns it for a block that is not to be stored.
const Refused = ^uint32(0)

// View is what a policy may ask the pool while it chooses a victim.
type View interface {
	// Child returns one of the children of e, visible or being written; 0 if it has none.
	Child(e uint32) uint32
	// Held reports whether an entry is pinned, is being written, or must stay for another reason.
	Held(e uint32) bool
}

// Use is a look-up. It may arrive late; duplicates are ignored.
type Use struct {
	Now         int64    // ns, monotonic
	BlockTokens uint32   // tokens of a block
	Prints      []uint64 // of all blocks of the chain, in order; at least one
	Entries     []uint32 // of the stored leading blocks; an entry whose print has changed is ignored
}

// Insertion is a run of blocks that were stored.
type Insertion struct {
	Now         int64 // ns, as in Use
	BlockTokens uint32
	Kind        uint8  // below MaxKinds
	Parent      uint32 // entry of the block before the first; 0 if it is not stored or there is none
	Entries     []uint32
	Prints      []uint64 // of each entry: a well-mixed hash of its key, always the same for the same key
}

// Finish is how a request ended.
type Finish uint8

// Ends of a request.
const (
	FinishUnknown Finish = iota
	FinishStop           // the model ended its turn
	FinishLength         // the limit of tokens
	FinishTool           // a tool call: the session comes back when the tool has returned
	FinishAbort          // the client left
)

// Advice is what an engine or an orchestrator tells of a chain: facts of the end of the request
// that used it, a wish to retain it, or both.
type Advice struct {
	Now     int64    // ns, monotonic, as in Use
	Prints  []uint64 // of the blocks advised on, in the order of their chain
	Entries []uint32 // of each block that is stored; 0 where it is not (yet)
	Finish  Finish
	Output  uint32 // tokens that the request generated; 0: not told
	// Retain: Priority 0 to 100 until Until (ns, monotonic); 50 changes nothing, 0 is evicted
	// first, 100 last. It decays as Until comes near, is soft, and never blocks an insertion.
	// Until 0: no wish.
	Priority uint8
	Until    int64
}

// PolicyReport is the state of a policy.
type PolicyReport struct {
	Name    string `json:"policy"`
	Entries int    `json:"entries"` // it has
	Ghosts  int    `json:"ghosts"`  // removed entries that it remembers
	Bytes   int64  `json:"bytes"`   // memory it holds

	Lookups uint64 `json:"blocks_looked_up" metric:"eviction_lookups_total"` // blocks
	Hits    uint64 `json:"blocks_hit" metric:"eviction_hits_total"`
	// Beyond counts, about, blocks that were looked up and missed, and had been stored once: a pool
	// that evicts nothing would have had them.
	Beyond uint64 `json:"blocks_beyond"`
	// Saved estimates the hits that would not have been without wishes: of blocks that were worth
	// less without theirs than what was evicted lately.
	Saved   uint64 `json:"blocks_saved" metric:"hint_blocks_total{outcome=saved}"`
	Refused uint64 `json:"blocks_refused" metric:"eviction_refused_total"` // worth less than all stored
	// LookupsDropped counts look-ups not passed to the policy because its queue was full.
	LookupsDropped uint64 `json:"lookups_dropped"`

	Classes []PolicyClass `json:"classes,omitempty"`
}

// PolicyClass is a class of similar blocks in a policy.
type PolicyClass struct {
	Name    string `json:"name"`
	Entries int    `json:"entries"`
	Evicted uint64 `json:"evicted"`
	// Worth is the expected hits of an entry per hour in memory, as learned: right after a use, and
	// for the entry of the class that would be evicted next (0 if the class is empty).
	Worth     float64 `json:"worth"`
	WorthNext float64 `json:"worth_next"`
}

// Cause is why an entry left memory.
type Cause uint8

// The causes.
const (
	ByEviction   Cause = iota + 1 // to make room
	ByBudget                      // to keep the budget of its owner
	ByAge                         // it lacked shards
	ByReset                       // of its space
	ByTime                        // the time that its request gave was over, and nothing had used it
	ByCorruption                  // its bytes did not verify
	ByBadPage                     // its memory cannot be read any more
)

// Departure is an entry that left memory.
type Departure struct {
	Space Fingerprint
	Block uint64 // Mark of its hash
	Group uint8
	Cause Cause
	Class string // of the eviction policy; empty: it had none
}

// Mark returns 64 bits that stand for a block hash where there is no room for more. It mixes all of
// the hash, and does not resist who chooses hashes.
func Mark(hash []byte) uint64 {
	h := MakeHash(hash)
	var words [4]uint64
	for i := range words {
		words[i] = binary.LittleEndian.Uint64(h.Bytes[8*i:])
	}
	return MarkWords(&words)
}

// MarkWords is Mark of a zero-padded hash in little-endian words.
func MarkWords(w *[4]uint64) uint64 {
	const a, b, c, d = 0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb, 0xd6e8feb86659fd93
	hi, lo := bits.Mul64(w[0]^a, w[1]^b)
	hi2, lo2 := bits.Mul64(w[2]^c, w[3]^d)
	return hi ^ lo ^ hi2 ^ lo2
}

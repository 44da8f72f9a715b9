package advisor

import "github.com/kvagent/kvagent/pool"

// Policy chooses the entries to evict. It is pure: it has no lock, no clock and no goroutine; the
// pool calls it with its own lock held. Entries are small dense numbers from 1 on, assigned by the
// pool and reused after Remove; 0 is none. The policy reads the chain of an entry through View, so
// that only the pool stores it.
type Policy interface {
	// Access records one look-up of a chain. The policy does not retain u.
	Access(u *pool.Use)
	// Insert adds entries in the order of their chain. It ignores those it already has.
	Insert(i *pool.Insertion)
	// Remove removes entries that were evicted or dropped. It ignores those it does not have.
	Remove(entries []uint32)
	// Advise records what was told of a chain of entries. The policy does not retain a.
	Advise(a *pool.Advice)
	// Victim is pool.Advisor's.
	Victim(now int64, kinds uint64, print uint64, v pool.View) uint32
	// Class returns the name of an entry's class, as pool.PolicyClass.Name; empty if it has none.
	Class(e uint32) string
	// Report returns the policy's state, for people and metrics. It allocates.
	Report() pool.PolicyReport
}

// Learner is a Policy whose knowledge can be passed to the policy of the next process. A pool that
// outlives its process saves it periodically and on Close.
//
// Implemented by pool/evict.Hazard. Without it, the policy learns anew after each restart.
type Learner interface {
	// Learned encodes what the policy knows: at most pool.MaxLearned bytes, with a version and a
	// checksum of their own. It contains nothing about single entries, so it may be older than they
	// are.
	Learned() []byte
	// Learn decodes and takes over what Learned returned, preferably before the first Insert. On an
	// error (damage, another version) nothing has changed and the policy learns anew.
	Learn(learned []byte) error
}

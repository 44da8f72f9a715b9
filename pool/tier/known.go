package tier

import (
	"hash/maphash"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// known remembers for a while what a store was found to have and not to have. It has a fixed number of cells; what finds no room takes the place of
// what would be forgotten first. Entries are told apart by 64 bits of a hash with a secret seed: two that are mixed up cost a fetch that finds nothing.
type known struct {
	mu    sync.Mutex
	cells []cell
}

// cell is one entry; until 0 is free.
type cell struct {
	print uint64
	until int64 // ns of the stack's clock, the lowest bit being whether it is there
}

// ways is the cells that one entry may lie in.
const ways = 4

func newKnown(entries int) known { return known{cells: make([]cell, entries)} } // a power of two

// set of cells that a print belongs to.
func (k *known) set(print uint64) []cell {
	i := int(print>>32) & (len(k.cells)/ways - 1) * ways
	return k.cells[i : i+ways]
}

// get says whether something is known of an entry, and what.
func (k *known) get(print uint64, now time.Time) (there, told bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.set(print) {
		if c.print == print && c.until > now.UnixNano() {
			return c.until&1 == 1, true
		}
	}
	return false, false
}

// put remembers what was found until a time.
func (k *known) put(print uint64, there bool, until time.Time) {
	at := until.UnixNano() &^ 1
	if there {
		at |= 1
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	set := k.set(print)
	victim := &set[0]
	for i := range set {
		c := &set[i]
		if c.print == print {
			victim = c
			break
		}
		if c.until < victim.until {
			victim = c
		}
	}
	*victim = cell{print, at}
}

// forget what was known of an entry.
func (k *known) forget(print uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, c := range k.set(print) {
		if c.print == print {
			k.set(print)[i] = cell{}
		}
	}
}

var printSeed = maphash.MakeSeed()

// print of an entry in the tiers.
func (l *life) print(group uint8, hash []byte) uint64 {
	var b [16 + 2 + pool.MaxHashLen]byte
	copy(b[:], l.stored[:])
	b[16], b[17] = group, uint8(len(hash))
	return maphash.Bytes(printSeed, b[:18+copy(b[18:], hash)])
}

package evict

import (
	"iter"
	"math/bits"
)

// kind are the entries of one kind: those that LRU with as much room would have, and those it would not.
type kind struct {
	young, old cells
	entries    int
	gone       [numClasses]uint64 // entries that went
	shadow     shadow
}

func newKind() *kind {
	k := &kind{}
	k.young.init()
	k.old.init()
	return k
}

// cells are those that an entry of the kind is in.
func (k *kind) cells(n *node) *cells {
	if n.state&stateRecent != 0 {
		return &k.young
	}
	return &k.old
}

// both are all cells; the older entries come first.
func (k *kind) both() [2]*cells { return [2]*cells{&k.old, &k.young} }

// kind makes a kind when its first entry comes.
func (h *Hazard) kind(kind uint8) *kind {
	for len(h.kinds) <= int(kind) {
		h.kinds = append(h.kinds, nil)
	}
	if h.kinds[kind] == nil {
		h.kinds[kind] = newKind()
	}
	return h.kinds[kind]
}

// kindsIn are the kinds whose bit is set.
func kindsIn(mask uint64) iter.Seq[int] {
	return func(yield func(int) bool) {
		for ; mask != 0; mask &= mask - 1 {
			if !yield(bits.TrailingZeros64(mask)) {
				return
			}
		}
	}
}

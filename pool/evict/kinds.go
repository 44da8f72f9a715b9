package evict

import (
	"iter"
	"math/bits"
)

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

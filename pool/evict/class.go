package evict

import (
	"fmt"
	"math/bits"
)

// A class is what is known of a block when its chain is looked up: how often it was used again, its
// distance from the end of the chain, whether the chain continues a conversation, and whether much
// of the chain after it is new.
const (
	numClasses = (maxUses + 1) * distances * turns * 2
	turns      = 2
	maxUses    = 3 // uses after the first are distinguished up to here
	distances  = 4

	unitTokens = 512     // distances are counted in units of this many tokens
	longTokens = 8 * 512 // new tokens from which a chain counts as one with much new
)

// chainTraits are what all blocks of a look-up share.
type chainTraits struct {
	length      int
	blockTokens uint32
	turn        uint8
	long        bool
}

func traits(length, known int, blockTokens uint32, turn uint8) chainTraits {
	if blockTokens == 0 {
		blockTokens = unitTokens
	}
	return chainTraits{length, blockTokens, turn, uint64(length-known)*uint64(blockTokens) >= longTokens}
}

// class returns the class of block i of the chain, which was used again uses times.
func (t *chainTraits) class(i int, uses uint8) uint8 {
	units := max(1, uint64(t.length-i)*uint64(t.blockTokens)/unitTokens)
	far := min(distances-1, bits.Len64(units)-1)
	c := (uses*distances+uint8(far))*turns + t.turn
	c *= 2
	if t.long {
		c++
	}
	return c
}

func usesOf(class uint8) uint8 { return class / (2 * turns * distances) }
func turnOf(class uint8) uint8 { return class / 2 % turns }

// nextTurn returns the turn of a chain whose last known block is of a class.
func nextTurn(class uint8) uint8 {
	if usesOf(class) > 0 {
		return 0
	}
	return min(turnOf(class)+1, turns-1)
}

var distanceNames = [distances]string{"0.5k", "1k", "2k", "4k+"}

// className returns the name of a class in labels of metrics.
func className(c int) string {
	uses, far, turn, fresh := c/2/turns/distances, c/2/turns%distances, c/2%turns, "short"
	if c&1 != 0 {
		fresh = "long"
	}
	return fmt.Sprintf("uses=%d,tail=%s,turn=%d,new=%s", uses, distanceNames[far], turn, fresh)
}

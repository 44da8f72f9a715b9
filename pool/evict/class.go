package evict

import (
	"fmt"
	"math/bits"
)

// A class is what is known of a block when its chain is looked up: how often it was used again, its
// distance from the end of the chain, whether much of the chain is new, and how long ago the chain
// was looked up before: a session that asked a moment ago asks again soon.
const (
	numClasses = kindsOfUse * gaps
	kindsOfUse = (maxUses + 1) * distances * 2
	maxUses    = 3 // uses after the first are distinguished up to here
	distances  = 4
	gaps       = 16 // 0: nothing of the chain was known; then an octave each, from less than gapUnit on

	unitTokens = 512     // distances are counted in units of this many tokens
	longTokens = 8 * 512 // new tokens from which a chain counts as one with much new
	gapUnit    = 250     // ms
)

// chainTraits are what all blocks of a look-up share.
type chainTraits struct {
	length      int
	blockTokens uint32
	gap         uint8
	long        uint16 // 1: much of the chain is new
}

func traits(length, known int, blockTokens uint32, gap uint8) chainTraits {
	if blockTokens == 0 {
		blockTokens = unitTokens
	}
	long := uint16(0)
	if uint64(length-known)*uint64(blockTokens) >= longTokens {
		long = 1
	}
	return chainTraits{length, blockTokens, gap, long}
}

// class returns the class of block i of the chain, which was used again uses times.
func (t *chainTraits) class(i int, uses uint8) uint16 {
	units := max(1, uint64(t.length-i)*uint64(t.blockTokens)/unitTokens)
	far := min(distances-1, bits.Len64(units)-1)
	return ((uint16(uses)*distances+uint16(far))*2+t.long)*gaps + uint16(t.gap)
}

func usesOf(class uint16) uint8 { return uint8(class / (gaps * 2 * distances)) }

// gapOf returns the class of a gap of so many ms.
func gapOf(ms uint32) uint8 { return uint8(min(gaps-1, 1+bits.Len32(ms/gapUnit))) }

var distanceNames = [distances]string{"0.5k", "1k", "2k", "4k+"}

// useNames are the names of the classes of all gaps, in labels of metrics too.
var useNames = func() (names [kindsOfUse]string) {
	for use := range names {
		fresh := [...]string{"short", "long"}[use%2]
		names[use] = fmt.Sprintf("uses=%d,tail=%s,new=%s", use/2/distances, distanceNames[use/2%distances], fresh)
	}
	return names
}()

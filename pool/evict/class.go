package evict

import (
	"cmp"
	"fmt"
	"math/bits"

	"github.com/kvagent/kvagent/pool"
)

// A class is what is known of a block at its last use, or when it was advised on. There are three
// families:
//
//	used:   uses, distance from the end of the chain, whether much of the chain is new, gap
//	ended:  fact of the end of the request, uses, distance, gap
//	wished: priority, whether used again, time to retain it
//
// The gap is how long ago the chain was looked up before: a session that asked a moment ago asks
// again soon.
const (
	numClasses  = firstWished + 2*priorities*gaps
	firstEnded  = usedGroups * gaps
	firstWished = firstEnded + endedGroups*gaps
	usedGroups  = (maxUses + 1) * distances * 2
	endedGroups = facts * (maxUses + 1) * distances
	groups      = numClasses / gaps // of classes that differ only in their gap or time

	maxUses    = 3 // uses after the first are distinguished up to here
	distances  = 4
	facts      = 8
	priorities = 4
	gaps       = 16 // 0: nothing of the chain was known; then an octave each, from less than gapUnit on

	unitTokens = 512     // distances are counted in units of this many tokens
	longTokens = 8 * 512 // new tokens from which a chain counts as one with much new
	gapUnit    = 250     // ms
	neutral    = 50      // priority
)

// chainTraits are what all blocks of a look-up share.
type chainTraits struct {
	length int
	tokens uint32 // of a block
	gap    uint16
	long   uint16 // 1: much of the chain is new
}

func traits(length, known int, blockTokens uint32, gap uint16) chainTraits {
	t := chainTraits{length: length, tokens: cmp.Or(blockTokens, unitTokens), gap: gap}
	if uint64(length-known)*uint64(t.tokens) >= longTokens {
		t.long = 1
	}
	return t
}

// class returns the class of block i of the chain, which was used again uses times.
func (t *chainTraits) class(i int, uses uint16) uint16 {
	units := max(1, uint64(t.length-i)*uint64(t.tokens)/unitTokens)
	far := uint16(min(distances-1, bits.Len64(units)-1))
	return ((uses*distances+far)*2+t.long)*gaps + t.gap
}

// again returns the uses of a block of a class after one more.
func again(class uint16) uint16 { return min(usesOf(class)+1, maxUses) }

func usesOf(class uint16) uint16 { return class / (gaps * 2 * distances) }

// advised returns the class of a block of which a was told; class is the one without.
func advised(class uint16, a *pool.Advice) uint16 {
	if left := a.Until - a.Now; left > 0 && a.Priority != neutral {
		level := min(uint16(a.Priority), 100) * priorities / 101
		return firstWished + (2*level+min(usesOf(class), 1))*gaps + gapOf(uint32(min(left/1e6, 1<<31)))
	}
	if a.Output == 0 && a.Finish == pool.FinishUnknown {
		return class
	}
	return firstEnded + (factOf(a)*(maxUses+1)*distances+class/(2*gaps))*gaps + class%gaps
}

// factOf numbers the ends of requests: with no reason known they are told apart by their output.
func factOf(a *pool.Advice) uint16 {
	long := uint16(min(3, bits.Len32(a.Output/256)/2+bits.Len32(a.Output/256)%2))
	switch a.Finish {
	case pool.FinishTool:
		return 4 + long/2
	case pool.FinishStop, pool.FinishLength:
		return 6
	case pool.FinishAbort:
		return 7
	}
	return long
}

// gapOf returns the class of a gap of so many ms.
func gapOf(ms uint32) uint16 { return uint16(min(gaps-1, 1+bits.Len32(ms/gapUnit))) }

// groupNames are the names of the classes of all gaps, in labels of metrics too.
var groupNames = func() (names [groups]string) {
	tails := [distances]string{"0.5k", "1k", "2k", "4k+"}
	ends := [facts]string{"short", "medium", "long", "longest", "tool", "tool_long", "stop", "abort"}
	for g := range names {
		switch ended, wished := g-usedGroups, g-usedGroups-endedGroups; {
		case wished >= 0:
			wished /= 2
			low, next := (wished*101+priorities-1)/priorities, ((wished+1)*101+priorities-1)/priorities
			names[g] = fmt.Sprintf("priority=%d-%d", low, next-1)
		case ended >= 0:
			end, uses, tail := ends[ended/distances/(maxUses+1)], ended/distances%(maxUses+1), tails[ended%distances]
			names[g] = fmt.Sprintf("end=%s,uses=%d,tail=%s", end, uses, tail)
		default:
			fresh := [...]string{"short", "long"}[g%2]
			names[g] = fmt.Sprintf("uses=%d,tail=%s,new=%s", g/2/distances, tails[g/2%distances], fresh)
		}
	}
	return names
}()

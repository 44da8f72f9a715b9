// Package pooltest holds pools and stores to their promises: suites that every implementation runs
// in three lines.
package pooltest

import (
	"testing"
	"time"
)

// Pool is what a pool offers to those who move blocks.
type Pool interface {
	Memory
	Check() error // walks everything and names the first promise that does not hold
	Close() error
}

// Options of the pool a test needs.
type Options struct {
	Bytes     int64
	SlabBytes int64            // for pools that have slabs; divides Bytes
	Clock     func() time.Time // nil: any
}

// Open makes an empty pool, which the suite closes.
type Open func(t testing.TB, o Options) Pool

// TestPool runs every promise of pool.Index, pool.Slots and pool.Spaces, and that of the order of
// use.
func TestPool(t *testing.T, open Open) {
	TestPoolInAnyOrder(t, open)
	t.Run("LeastRecentlyUsedGoesFirst", func(t *testing.T) { testLeastRecent(t, open) })
}

// TestPoolInAnyOrder runs every promise but that of the order of use, which a pool with a policy of
// its own does not give.
func TestPoolInAnyOrder(t *testing.T, open Open) {
	for _, c := range []struct {
		name string
		test func(*testing.T, Open)
	}{
		{"EntryInvisibleWithOneRankMissing", testInvisible},
		{"ReserveSaysWhatIs", testReserveStatus},
		{"GivenUpIsNotStored", testGiveUp},
		{"KeysDoNotMix", testKeysDoNotMix},
		{"ViewsOfChains", testViews},
		{"PinStaysWithinItsBytes", testPinBytes},
		{"PinnedIsNotEvicted", testPinned},
		{"HalfWrittenIsNotEvicted", testHalfWritten},
		{"SuffixGoesBeforeItsPrefix", testSuffixFirst},
		{"LateSuffixGoesBeforeItsPrefix", testLateSuffix},
		{"OldChainGoesWhole", testOldChain},
		{"ChainStoredInPiecesMakesRoom", testPieces},
		{"HealedChainGoesSuffixFirst", testHealed},
		{"SuffixDoesNotPushOutItsOwnPrefix", testOwnPrefix},
		{"NoHoleInAChain", testNoHole},
		{"CircleOfHashesIsStillEvicted", testCircle},
		{"SecondModelGetsMemory", testSecondModel},
		{"SecondSizeEvictsLittle", testSecondSize},
		{"ManySizesEvictLittle", testManySizes},
		{"PressureIsAskedOnce", testPressure},
		{"PartialGoesUnderPressure", testPartialPressure},
		{"PartialDoesNotTakeItsChain", testPartialChain},
		{"PartialGoesWithAge", testPartialAge},
		{"ResetDropsAtOnce", testReset},
		{"ResetMakesCommitStale", testResetCommit},
		{"ResetIsSweptLater", testSweep},
		{"ClosedIsForgotten", testClose},
		{"ClosedStaysClosed", testCloseHeld},
		{"SpacesComeAndGo", testManySpaces},
		{"CorruptIsDropped", testCorrupt},
		{"HandedBackTwiceCountsOnce", testTwice},
		{"ChecksumBoundToTheKey", testSumBound},
		{"SpacesByIdentity", testSpaces},
		{"AnyOrderUnderPressure", testAnyOrder},
		{"ManyAtOnce", testManyAtOnce},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, open) })
	}
}

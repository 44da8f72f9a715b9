// Package pooltest has the contract tests of pools and stores, which every implementation runs in
// three lines.
package pooltest

import (
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Pool is a pool whose slots this process can read and write. One that can verify its invariants
// has a method Check() error, which returns the first violation.
type Pool interface {
	pool.Index
	pool.Slots
	pool.Spaces
	Arena() (base []byte, fd int)
	Close() error
}

// Options are the options of a test's pool.
type Options struct {
	Bytes     int64
	SlabBytes int64            // for pools that have slabs; divides Bytes
	Clock     func() time.Time // nil: any
}

// Open makes an empty pool, which the suite closes.
type Open func(t testing.TB, o Options) Pool

// TestPool tests the contracts of pool.Index, pool.Slots and pool.Spaces, and the order of
// eviction.
func TestPool(t *testing.T, open Open) {
	TestPoolInAnyOrder(t, open)
	t.Run("LeastRecentlyUsedGoesFirst", func(t *testing.T) { testLeastRecent(t, open) })
}

// TestPoolInAnyOrder tests the same except the order of eviction, which a pool with a policy of its
// own does not have.
func TestPoolInAnyOrder(t *testing.T, open Open) {
	for _, c := range []struct {
		name string
		test func(*testing.T, Open)
	}{
		{"EntryInvisibleWithOneRankMissing", testInvisible},
		{"EntriesHaveManyShards", testManyShards},
		{"ReserveSaysWhatIs", testReserveStatus},
		{"GivenUpIsNotStored", testGiveUp},
		{"KeysDoNotMix", testKeysDoNotMix},
		{"ViewsOfChains", testViews},
		{"PinStaysWithinItsBytes", testPinBytes},
		{"PinnedIsNotEvicted", testPinned},
		{"SuffixGoesBeforeItsPrefix", testSuffixFirst},
		{"OldChainGoesWhole", testOldChain},
		{"ChainStoredInPiecesMakesRoom", testPieces},
		{"SuffixDoesNotPushOutItsOwnPrefix", testOwnPrefix},
		{"NoHoleInAChain", testNoHole},
		{"CircleOfHashesIsStillEvicted", testCircle},
		{"SecondSizeEvictsLittle", testSecondSize},
		{"ManySizesEvictLittle", testManySizes},
		{"PressureIsAskedOnce", testPressure},
		{"ResetUnderPressure", testResetUnderPressure},
		{"PartialGoesUnderPressure", testPartialPressure},
		{"PartialDoesNotTakeItsChain", testPartialChain},
		{"ResetDropsAtOnce", testReset},
		{"ResetMakesCommitStale", testResetCommit},
		{"ResetIsSweptLater", testSweep},
		{"ClosedIsForgotten", testClose},
		{"ClosedStaysClosed", testCloseHeld},
		{"SpacesComeAndGo", testManySpaces},
		{"CorruptIsDropped", testCorrupt},
		{"HandedBackTwiceCountsOnce", testTwice},
		{"SpacesByIdentity", testSpaces},
		{"AnyOrderUnderPressure", testAnyOrder},
		{"ManyAtOnce", testManyAtOnce},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, open) })
	}
}

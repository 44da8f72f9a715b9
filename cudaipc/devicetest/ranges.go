package devicetest

import (
	"errors"
	"math"

	"github.com/kvagent/kvagent/cudaipc"
)

func testOutOfRange(t T, f Fixture) {
	const size = 1 << 20
	c := Start(t, f, 1, small)
	c.Do(Op{Kind: Fill, Region: 1, Len: size, Seed: 2})
	arena := int64(len(f.Arena))
	clear(f.Arena[:4096])
	good := cudaipc.Run{Region: 1, Len: 4096}
	for name, bad := range map[string]cudaipc.Run{
		"no such region":             {Region: 77, Len: 1},
		"beyond the region":          {Region: 1, RegionOff: size, Len: 1},
		"one byte too far":           {Region: 1, RegionOff: size - 4095, Len: 4096},
		"region offset overflows":    {Region: 1, RegionOff: math.MaxUint64, Len: 2},
		"region offset negative":     {Region: 1, RegionOff: 1 << 63, Len: 4096},
		"longest":                    {Region: 1, Len: math.MaxUint32},
		"beyond the arena":           {Region: 1, ArenaOff: arena, Len: 1},
		"arena one byte too far":     {Region: 1, ArenaOff: arena - 4095, Len: 4096},
		"arena offset negative":      {Region: 1, ArenaOff: -1, Len: 4096},
		"arena offset overflows":     {Region: 1, ArenaOff: math.MaxInt64, Len: 4096},
		"arena offset most negative": {Region: 1, ArenaOff: math.MinInt64, Len: 4096},
	} {
		for _, dir := range []cudaipc.Direction{cudaipc.Gather, cudaipc.Scatter} {
			copy := one(dir, good, bad)
			copy.Peer = 1
			if _, err := f.Device.Copy(copy); !errors.Is(err, cudaipc.ErrRange) {
				t.Errorf("%s, direction %d: %v, want ErrRange", name, dir, err)
			}
		}
	}
	for name, copy := range map[string]*cudaipc.Copy{
		"fewer runs than named": {Runs: []cudaipc.Run{good}, Blocks: []cudaipc.Block{{Runs: 2}}},
		"more runs than named":  {Runs: []cudaipc.Run{good, good}, Blocks: []cudaipc.Block{{Runs: 1}}},
		"sum of runs overflows": {
			Runs:   []cudaipc.Run{good},
			Blocks: []cudaipc.Block{{Runs: math.MaxUint32}, {Runs: 2}},
		},
		"no such direction": {Dir: 2, Runs: []cudaipc.Run{good}, Blocks: []cudaipc.Block{{Runs: 1}}},
	} {
		copy.Peer = 1
		if _, err := f.Device.Copy(copy); !errors.Is(err, cudaipc.ErrRange) {
			t.Errorf("%s: %v, want ErrRange", name, err)
		}
	}
	c.Copy(&cudaipc.Copy{}) // nothing to do is no error
	for i, b := range f.Arena[:4096] {
		if b != 0 {
			t.Fatalf("a refused copy wrote byte %d of the arena", i)
		}
	}
	c.Copy(one(cudaipc.Gather, good))
}

func testAnotherPeersRegion(t T, f Fixture) {
	Start(t, f, 1, Spec{Regions: []int64{1 << 20, 1 << 20}})
	c := Start(t, f, 2, small) // has region 1 only
	copy := one(cudaipc.Gather, cudaipc.Run{Region: 2, Len: 4096})
	copy.Peer = c.peer
	if _, err := f.Device.Copy(copy); !errors.Is(err, cudaipc.ErrRange) {
		t.Errorf("Copy of a region that only another peer has: %v, want ErrRange", err)
	}
}

func testWordsOutOfRange(t T, f Fixture) {
	Start(t, f, 1, small)
	for _, w := range []cudaipc.Wait{
		{Peer: 1, Event: 4, Revoke: cudaipc.None},
		{Peer: 1, Event: cudaipc.None, Revoke: 4},
		{Peer: 1, Event: cudaipc.None - 1, Revoke: cudaipc.None},
	} {
		if err := f.Device.Poll([]cudaipc.Wait{w}, make([]cudaipc.State, 1)); !errors.Is(err, cudaipc.ErrRange) {
			t.Errorf("Poll of %+v: %v, want ErrRange", w, err)
		}
	}
}

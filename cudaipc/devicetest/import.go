package devicetest

import (
	"errors"
	"math"
	"os"
	"strings"

	"github.com/kvagent/kvagent/cudaipc"
)

var small = Spec{Regions: []int64{1 << 20}, Events: 4, Revokes: 4}

func testImportAndClose(t T, f Fixture) {
	c := Start(t, f, small)
	run := cudaipc.Run{Region: 1, Len: 4096}
	c.Copy(one(cudaipc.Gather, run))
	c.Close()
	if err := c.Peer.Close(); !errors.Is(err, cudaipc.ErrPeer) {
		t.Errorf("second Close of a peer: %v, want ErrPeer", err)
	}
	if _, err := c.Peer.Copy(&cudaipc.Copy{}); !errors.Is(err, cudaipc.ErrPeer) {
		t.Errorf("Copy after Close: %v, want ErrPeer", err)
	}
	_, err := c.Peer.Poll(cudaipc.Wait{Event: cudaipc.None, Revoke: cudaipc.None})
	if !errors.Is(err, cudaipc.ErrPeer) {
		t.Errorf("Poll after Close: %v, want ErrPeer", err)
	}
	c.attach()
	c.Copy(one(cudaipc.Gather, run))
}

func testImportRefuses(t T, f Fixture) {
	c := Start(t, f, small)
	for name, change := range map[string]func(*cudaipc.Import){
		"a region id twice":        func(im *cudaipc.Import) { im.Regions[0].ID = im.Regions[1].ID },
		"an unknown kind":          func(im *cudaipc.Import) { im.Regions[1].Kind = 99 },
		"a region of no bytes":     func(im *cudaipc.Import) { im.Regions[1].Size = 0 },
		"a region of 2^63 bytes":   func(im *cudaipc.Import) { im.Regions[1].Size = 1 << 63 },
		"words in no region":       func(im *cudaipc.Import) { im.Sync.Region = 12345 },
		"words beyond the region":  func(im *cudaipc.Import) { im.Sync.EventsOff = 1 << 40 },
		"words that overflow":      func(im *cudaipc.Import) { im.Sync.RevokeOff = ^uint64(0) &^ 3 },
		"too many events":          func(im *cudaipc.Import) { im.Sync.Events = ^uint32(0) },
		"a step word out of place": func(im *cudaipc.Import) { im.Sync.StepOff = 4 },
	} {
		im, err := c.engine.Import()
		if err != nil {
			t.Fatal(err)
		}
		change(&im)
		if _, err := f.Device.Import(im); err == nil {
			t.Errorf("Import of %s: no error", name)
		}
	}
}

func testNothingLeaks(t T, f Fixture) {
	c := Start(t, f, Spec{Regions: make64(64, 1<<20), Events: 4})
	c.Close()
	maps, fds := resources(t)
	for range 20 {
		c.attach()
		c.Copy(one(cudaipc.Gather, cudaipc.Run{Region: 1, Len: 4096}))
		c.Close()
		im, err := c.engine.Import()
		if err != nil {
			t.Fatal(err)
		}
		im.Regions[len(im.Regions)-1].Size = 1 << 62
		if _, err := f.Device.Import(im); err == nil {
			t.Fatal("Import of a region of 2^62 bytes: no error")
		}
	}
	// The runtime may map or open a few for itself; a leak would be 20 times 65 of them.
	if m, d := resources(t); m > maps+20 || d > fds+10 {
		t.Errorf("20 imports left %d mappings and %d descriptors open", m-maps, d-fds)
	}
}

func make64(n int, size int64) []int64 {
	sizes := make([]int64, n)
	for i := range sizes {
		sizes[i] = size
	}
	return sizes
}

// resources counts the mappings and the descriptors of this process.
func resources(t T) (maps, fds int) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(text), "\n"), len(entries)
}

func testOutOfRange(t T, f Fixture) {
	const size = 1 << 20
	c := Start(t, f, small)
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
			if _, err := c.Peer.Copy(copy); !errors.Is(err, cudaipc.ErrRange) {
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
		if _, err := c.Peer.Copy(copy); !errors.Is(err, cudaipc.ErrRange) {
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
	Start(t, f, Spec{Regions: []int64{1 << 20, 1 << 20}})
	c := Start(t, f, small) // has region 1 only
	copy := one(cudaipc.Gather, cudaipc.Run{Region: 2, Len: 4096})
	if _, err := c.Peer.Copy(copy); !errors.Is(err, cudaipc.ErrRange) {
		t.Errorf("Copy of a region that only another peer has: %v, want ErrRange", err)
	}
}

func testWordsOutOfRange(t T, f Fixture) {
	c := Start(t, f, small)
	for _, w := range []cudaipc.Wait{
		{Event: 4, Revoke: cudaipc.None},
		{Event: cudaipc.None, Revoke: 4},
		{Event: cudaipc.None - 1, Revoke: cudaipc.None},
	} {
		if _, err := c.Peer.Poll(w); !errors.Is(err, cudaipc.ErrRange) {
			t.Errorf("Poll of %+v: %v, want ErrRange", w, err)
		}
	}
}

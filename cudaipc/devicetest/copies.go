package devicetest

import (
	"bytes"
	"hash/crc32"
	"math/rand/v2"

	"github.com/kvagent/kvagent/cudaipc"
)

// testBytesBothWays gathers scattered fragments of three regions, and scatters them to other
// places.
func testBytesBothWays(t T, f Fixture) {
	const fragment, fragments, size = 4096, 1000, 8 << 20
	c := Start(t, f, Spec{Regions: []int64{size, size, size}})
	for r := range 3 {
		c.Do(Op{Kind: Fill, Region: cudaipc.RegionID(r + 1), Len: size, Seed: uint64(r)})
	}
	random := rand.New(rand.NewPCG(1, 2))
	places := random.Perm(size / fragment)
	gather, scatter := &cudaipc.Copy{Dir: cudaipc.Gather}, &cudaipc.Copy{Dir: cudaipc.Scatter}
	for i := range fragments {
		from := cudaipc.Run{
			Region:    cudaipc.RegionID(1 + i%2),
			RegionOff: uint64(places[i]) * fragment,
			ArenaOff:  int64(i) * fragment,
			Len:       fragment,
		}
		gather.Runs = append(gather.Runs, from)
		from.Region, from.RegionOff = 3, uint64(places[fragments-1-i])*fragment
		scatter.Runs = append(scatter.Runs, from)
	}
	for left := fragments; left > 0; left -= 8 {
		gather.Blocks = append(gather.Blocks, cudaipc.Block{Runs: uint32(min(left, 8))})
	}
	scatter.Blocks = gather.Blocks
	c.Copy(gather)
	want := make([]byte, fragment)
	for i := range fragments {
		Pattern(want, uint64(i%2), int64(places[i])*fragment)
		if !bytes.Equal(want, f.Arena[i*fragment:(i+1)*fragment]) {
			t.Fatalf("fragment %d: the arena has other bytes than the region", i)
		}
	}
	c.Copy(scatter)
	for i := range fragments {
		Pattern(want, uint64(i%2), int64(places[i])*fragment)
		got := c.Do(Op{Kind: Read, Region: 3, Off: int64(places[fragments-1-i]) * fragment, Len: fragment})
		if !bytes.Equal(want, got) {
			t.Fatalf("fragment %d: the engine reads other bytes than the arena has", i)
		}
	}
}

// testOddFragments copies runs of odd lengths to odd offsets, beside which nothing may change.
func testOddFragments(t T, f Fixture) {
	c := Start(t, f, small)
	c.Do(Op{Kind: Fill, Region: 1, Len: 1 << 20, Seed: 9})
	random := rand.New(rand.NewPCG(3, 4))
	for i := range 50 {
		n, from, to := 1+random.IntN(1+random.IntN(100_000)), random.IntN(1000), 1+random.IntN(1000)
		clear(f.Arena[:to+n+1])
		c.Copy(one(cudaipc.Gather, cudaipc.Run{
			Region:    1,
			RegionOff: uint64(from),
			ArenaOff:  int64(to),
			Len:       uint32(n),
		}))
		want := make([]byte, n)
		Pattern(want, 9, int64(from))
		if !bytes.Equal(f.Arena[to:to+n], want) || f.Arena[to-1] != 0 || f.Arena[to+n] != 0 {
			t.Fatalf("%d: gather of %d bytes from %d to %d is wrong, or wrote beside", i, n, from, to)
		}
		c.Do(Op{Kind: Write, Region: 1, Off: 500_000, Data: make([]byte, n+2)})
		c.Copy(one(cudaipc.Scatter, cudaipc.Run{Region: 1, RegionOff: 500_001, ArenaOff: int64(to), Len: uint32(n)}))
		got := c.Do(Op{Kind: Read, Region: 1, Off: 500_000, Len: int64(n + 2)})
		if !bytes.Equal(got[1:n+1], want) || got[0] != 0 || got[n+1] != 0 {
			t.Fatalf("%d: scatter of %d bytes from %d is wrong, or wrote beside", i, n, to)
		}
		c.Do(Op{Kind: Fill, Region: 1, Off: 500_000, Len: int64(n + 2), Seed: 9})
	}
}

func testSums(t T, f Fixture) {
	const size = 1 << 20
	c := Start(t, f, small)
	c.Do(Op{Kind: Fill, Region: 1, Len: size, Seed: 5})
	image := make([]byte, size)
	Pattern(image, 5, 0)
	random := rand.New(rand.NewPCG(5, 6))
	copies := [2]cudaipc.Copy{{Dir: cudaipc.Gather, Sum: true}, {Dir: cudaipc.Scatter, Sum: true}}
	var want []uint32
	table, at := crc32.MakeTable(crc32.Castagnoli), 0
	for range 64 {
		runs, seed := random.IntN(8), random.Uint32()
		sum := seed
		for range runs {
			n := random.IntN(1 + random.IntN(40_000))
			from := random.IntN(size - n)
			run := cudaipc.Run{Region: 1, RegionOff: uint64(from), ArenaOff: int64(at), Len: uint32(n)}
			copies[0].Runs = append(copies[0].Runs, run)
			copies[1].Runs = append(copies[1].Runs, run)
			sum = crc32.Update(sum, table, image[from:from+n])
			at += n
		}
		copies[0].Blocks = append(copies[0].Blocks, cudaipc.Block{Runs: uint32(runs), Seed: seed})
		want = append(want, sum)
	}
	copies[1].Blocks = copies[0].Blocks
	for i := range copies {
		for b, sum := range c.Copy(&copies[i]).Sums {
			if sum != want[b] {
				t.Fatalf("direction %d, block %d: sum %08x, CRC-32C is %08x", i, b, sum, want[b])
			}
		}
	}
}

// testOrder overwrites one place of the arena by many copies: the last one submitted must win.
func testOrder(t T, f Fixture) {
	const n, copies = 64 << 10, 16
	c := Start(t, f, small)
	c.Do(Op{Kind: Fill, Region: 1, Len: 1 << 20, Seed: 1})
	want := make([]byte, n)
	Pattern(want, 1, (copies-1)*n)
	for round := range 30 {
		var tickets []cudaipc.Ticket
		for i := range copies {
			tickets = append(tickets, c.Submit(one(cudaipc.Gather, cudaipc.Run{
				Region:    1,
				RegionOff: uint64(i) * n,
				Len:       n,
			})))
		}
		for _, ticket := range tickets {
			c.Wait(ticket)
		}
		if !bytes.Equal(f.Arena[:n], want) {
			t.Fatalf("round %d: copies of one direction did not happen in the order of submission", round)
		}
	}
}

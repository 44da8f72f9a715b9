package devicetest

import (
	"errors"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// sample starts sums of a peer's memory.
func (c *Session) sample(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	c.t.Helper()
	return c.Peer.Sum(s)
}

// sums returns the end of a sample.
func (c *Session) sums(s *cudaipc.Sample) cudaipc.Done {
	c.t.Helper()
	ticket, err := c.sample(s)
	if err != nil {
		c.t.Fatalf("Sum: %v", err)
	}
	return c.Wait(ticket)
}

// Three layers of blocks: two in the first region, each with its own distance between blocks, and
// one in the second, longer than a device reads at once.
const (
	sampledBlocks = 9
	firstPiece    = 1000
	secondPiece   = 4096
	thirdPiece    = 300_001
)

var (
	sampledPieces = []cudaipc.Piece{
		{Region: 1, Offset: 512, Stride: 2 * firstPiece, Bytes: firstPiece},
		{Region: 1, Offset: 512 + 2*firstPiece*sampledBlocks, Stride: secondPiece, Bytes: secondPiece},
		{Region: 2, Offset: 7, Stride: thirdPiece, Bytes: thirdPiece},
	}
	sampled = Spec{Regions: []int64{1 << 20, 8 << 20}, Events: 1, Revokes: 1}
)

// startSampled starts an engine whose regions have the patterns 1 and 2.
func startSampled(t T, f Fixture) *Session {
	t.Helper()
	c := Start(t, f, sampled)
	for i, size := range sampled.Regions {
		c.Do(Op{Kind: Fill, Region: cudaipc.RegionID(i + 1), Len: size, Seed: uint64(i + 1)})
	}
	return c
}

// testSamples: sums are of the engine's memory as it is now, and nothing else changes.
func testSamples(t T, f Fixture) {
	c := startSampled(t, f)
	random := rand.New(rand.NewPCG(11, 12))
	for i := range f.Arena[:1<<20] {
		f.Arena[i] = byte(i)
	}
	s := &cudaipc.Sample{Within: cudaipc.MaxSampleWait, Pieces: sampledPieces}
	for range 30 {
		s.Blocks = append(s.Blocks, cudaipc.SampleBlock{Block: random.Uint32N(sampledBlocks), Seed: random.Uint32()})
	}
	c.wantSums(s)
	for i, b := range f.Arena[:1<<20] {
		if b != byte(i) {
			t.Fatalf("byte %d of the arena has changed: sums are made beside it", i)
		}
	}
	last := &s.Pieces[2] // one byte of the last piece of one block
	changed := s.Blocks[4].Block
	off := int64(last.Offset) + int64(changed)*thirdPiece + thirdPiece - 1
	before := c.sums(s)
	c.Do(Op{Kind: Write, Region: 2, Off: off, Data: []byte{^c.Do(Op{Kind: Read, Region: 2, Off: off, Len: 1})[0]}})
	for i, sum := range c.sums(s).Sums {
		if other := sum != before.Sums[i]; other != (s.Blocks[i].Block == changed) {
			t.Errorf("the last byte of block %d was changed: that the sum of block %d is another one is %v",
				changed, s.Blocks[i].Block, other)
		}
	}
}

// wantSums holds the sums of a sample of the fresh patterns against CRC-32C.
func (c *Session) wantSums(s *cudaipc.Sample) {
	c.t.Helper()
	d := c.sums(s)
	if d.Err != nil || d.Bad != nil || len(d.Sums) != len(s.Blocks) {
		c.t.Fatalf("%d sums, bad blocks %v: %v; want %d good ones", len(d.Sums), d.Bad, d.Err, len(s.Blocks))
	}
	table := crc32.MakeTable(crc32.Castagnoli)
	for i, b := range s.Blocks {
		want := b.Seed
		for _, p := range s.Pieces {
			data := make([]byte, p.Bytes)
			Pattern(data, uint64(p.Region), int64(p.Offset+uint64(b.Block)*p.Stride))
			want = crc32.Update(want, table, data)
		}
		if d.Sums[i] != want {
			c.t.Errorf("block %d: sum %08x, CRC-32C of the engine's memory is %08x", b.Block, d.Sums[i], want)
		}
	}
}

// testSamplesOutOfRange: nothing outside of the peer's regions is read, whatever the numbers are.
func testSamplesOutOfRange(t T, f Fixture) {
	c := startSampled(t, f)
	block := []cudaipc.SampleBlock{{Block: 1}}
	for name, s := range map[string]cudaipc.Sample{
		"no region":      {Pieces: []cudaipc.Piece{{Region: 9, Bytes: 1}}, Blocks: block},
		"beyond the end": {Pieces: []cudaipc.Piece{{Region: 1, Offset: 1<<20 - 10, Bytes: 11}}, Blocks: block},
		"a block beyond": {Pieces: []cudaipc.Piece{{Region: 1, Stride: 1 << 20, Bytes: 1}}, Blocks: block},
		"the last beyond": {Pieces: sampledPieces, Blocks: []cudaipc.SampleBlock{{Block: 2}, {Block: 1 << 20},
			{Block: 0}}},
		"huge offset": {Pieces: []cudaipc.Piece{{Region: 1, Offset: math.MaxUint64, Stride: 1, Bytes: 1}},
			Blocks: block},
		"huge stride": {Pieces: []cudaipc.Piece{{Region: 1, Stride: math.MaxUint64, Bytes: 1}},
			Blocks: []cudaipc.SampleBlock{{Block: 2}}},
		"overflow": {Pieces: []cudaipc.Piece{{Region: 1, Offset: 1, Stride: math.MaxUint64, Bytes: 1}},
			Blocks: block},
		"no time":       {Within: -1, Pieces: sampledPieces, Blocks: block},
		"too much time": {Within: cudaipc.MaxSampleWait + 1, Pieces: sampledPieces, Blocks: block},
	} {
		if s.Within == 0 {
			s.Within = time.Second
		} else if s.Within < 0 {
			s.Within = 0
		}
		if _, err := c.sample(&s); !errors.Is(err, cudaipc.ErrRange) {
			t.Errorf("%s: %v, want ErrRange", name, err)
		}
	}
	c.Close() // nothing of what was refused keeps the peer busy
}

// testSamplesEnd: a sample ends when its time is over, with bad blocks, and not before nothing
// reads the peer's memory any more.
func testSamplesEnd(t T, f Fixture) {
	c := startSampled(t, f)
	s := &cudaipc.Sample{Within: time.Nanosecond, Pieces: sampledPieces, Blocks: []cudaipc.SampleBlock{{Block: 1},
		{Block: 2}}}
	if d := c.sums(s); d.Err == nil || d.Bad == nil || !d.Bad[0] || !d.Bad[1] {
		t.Errorf("a sample without time: bad blocks %v, %v; want both bad", d.Bad, d.Err)
	}
	s.Within = cudaipc.MaxSampleWait
	c.wantSums(s)
	for i := range uint32(60) {
		s.Blocks = append(s.Blocks, cudaipc.SampleBlock{Block: i % sampledBlocks})
	}
	for tries := 1; closesWhileSumming(c, s); tries++ { // all samples had ended
		if tries == 20 {
			t.Fatal("Close is never refused while the peer's memory is summed")
		}
		c = startSampled(t, f)
	}
	c.Close()
}

// closesWhileSumming starts many samples and closes the peer. It reports whether that succeeds,
// which it may only after they have ended.
func closesWhileSumming(c *Session, s *cudaipc.Sample) (closes bool) {
	c.t.Helper()
	var tickets []cudaipc.Ticket
	for range 40 { // of 18 MiB each
		one := *s
		ticket, err := c.sample(&one)
		if err != nil {
			c.t.Fatal(err)
		}
		tickets = append(tickets, ticket)
	}
	err := c.Peer.Close()
	if err != nil && !errors.Is(err, cudaipc.ErrBusy) {
		c.t.Fatalf("Close while the peer's memory is summed: %v, want ErrBusy", err)
	}
	for _, ticket := range tickets {
		if err != nil {
			c.Wait(ticket)
		} else if d, ended, _ := ticket(0); !ended || d.Err != nil {
			c.t.Fatalf("Close has succeeded while the peer's memory is summed: %v", d.Err)
		}
	}
	return err == nil
}

// testDeathWhileSumming: a sample of a peer that dies ends. Its blocks are bad, or their sums are
// right.
func testDeathWhileSumming(t T, f Fixture) {
	c := startSampled(t, f)
	s := &cudaipc.Sample{Within: cudaipc.MaxSampleWait, Pieces: sampledPieces}
	for b := range uint32(sampledBlocks) {
		s.Blocks = append(s.Blocks, cudaipc.SampleBlock{Block: b})
	}
	want := c.sums(s)
	var tickets []cudaipc.Ticket
	for range 60 {
		one := *s
		ticket, err := c.sample(&one)
		if err != nil {
			t.Fatal(err)
		}
		tickets = append(tickets, ticket)
	}
	c.Kill()
	for _, ticket := range tickets {
		d := c.Wait(ticket)
		for i, sum := range d.Sums {
			if (d.Bad == nil || !d.Bad[i]) && sum != want.Sums[i] {
				t.Fatalf("block %d is said to have been summed around the death of its process, and its sum is wrong",
					i)
			}
		}
	}
	c.Close()
}

// Miscopy is a peer whose copies go wrong in one way, in the last block of each, without an error.
// As on a GPU, its sums are of what is in the arena then.
type Miscopy struct {
	cudaipc.Peer
	Arena []byte
	Fault Miscopied
}

// Miscopied is how a copy goes wrong.
type Miscopied int

// The ways.
const (
	CopiedShort      Miscopied = iota // the last run ends halfway
	CopiedBeside                      // the first run is of another place in the region
	CopiedOtherBlock                  // the region's runs of the block before are taken
	CopiedNotAll                      // the last run is left out
	CopiedSwapped                     // two runs change places in the region
	CopiedMisplaced                   // two runs change places in the arena
	CopiedWays
)

// Copy starts a copy that goes wrong.
func (m *Miscopy) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	wrong := *c
	wrong.Runs = append([]cudaipc.Run(nil), c.Runs...)
	wrong.Blocks = append([]cudaipc.Block(nil), c.Blocks...)
	n := int(c.Blocks[len(c.Blocks)-1].Runs)
	last := wrong.Runs[len(wrong.Runs)-n:]
	switch m.Fault {
	case CopiedShort:
		last[n-1].Len /= 2
	case CopiedBeside:
		last[0].RegionOff ^= 64
	case CopiedOtherBlock:
		for i := range last {
			before := &wrong.Runs[len(wrong.Runs)-2*n+i]
			last[i].Region, last[i].RegionOff = before.Region, before.RegionOff
		}
	case CopiedNotAll:
		wrong.Runs = wrong.Runs[:len(wrong.Runs)-1]
		wrong.Blocks[len(wrong.Blocks)-1].Runs--
	case CopiedSwapped:
		last[0].Region, last[1].Region = last[1].Region, last[0].Region
		last[0].RegionOff, last[1].RegionOff = last[1].RegionOff, last[0].RegionOff
	case CopiedMisplaced:
		last[0].ArenaOff, last[1].ArenaOff = last[1].ArenaOff, last[0].ArenaOff
	}
	ticket, err := m.Peer.Copy(&wrong)
	return func(timeout time.Duration) (cudaipc.Done, bool, error) {
		d, ok, err := ticket(timeout)
		m.sum(c, &d)
		return d, ok, err
	}, err
}

// sum replaces the sums of a copy by those of what is in the arena now: of the requested runs, or,
// where the runs of the arena were changed too, of those that were copied.
func (m *Miscopy) sum(c *cudaipc.Copy, d *cudaipc.Done) {
	if d.Sums == nil || m.Fault == CopiedMisplaced {
		return
	}
	run, table := 0, crc32.MakeTable(crc32.Castagnoli)
	for i, b := range c.Blocks {
		d.Sums[i] = b.Seed
		for range b.Runs {
			r := &c.Runs[run]
			d.Sums[i] = crc32.Update(d.Sums[i], table, m.Arena[r.ArenaOff:r.ArenaOff+int64(r.Len)])
			run++
		}
	}
}

package mover

import (
	"encoding/binary"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// Bytes of the elements of a copy.
const (
	wireBlock = 8
	wireRun   = 24
)

// putCopy puts a copy. Its number is the ticket.
func putCopy(b []byte, t cudaipc.Ticket, c *cudaipc.Copy) []byte {
	b = putHead(b, msgCopy, uint64(t))
	b = append(put32(b, uint32(c.Peer)), byte(c.Dir))
	b = put8(b, c.Sum)
	b = put32(b, uint32(len(c.Blocks)))
	for i := range c.Blocks {
		b = put32(put32(b, c.Blocks[i].Runs), c.Blocks[i].Seed)
	}
	b = put32(b, uint32(len(c.Runs)))
	for i := range c.Runs {
		r := &c.Runs[i]
		b = put64(put32(b, uint32(r.Region)), r.RegionOff)
		b = put32(put64(b, uint64(r.ArenaOff)), r.Len)
	}
	return b
}

// takeCopy reads a copy into c, whose slices are used again.
func takeCopy(f *fields, c *cudaipc.Copy) error {
	c.Peer, c.Dir, c.Sum = cudaipc.PeerID(f.u32()), cudaipc.Direction(f.u8()), f.flag()
	c.Blocks = c.Blocks[:0]
	for raw := f.take(f.count(wireBlock) * wireBlock); len(raw) > 0; raw = raw[wireBlock:] {
		c.Blocks = append(c.Blocks, cudaipc.Block{
			Runs: binary.LittleEndian.Uint32(raw),
			Seed: binary.LittleEndian.Uint32(raw[4:]),
		})
	}
	c.Runs = c.Runs[:0]
	for raw := f.take(f.count(wireRun) * wireRun); len(raw) > 0; raw = raw[wireRun:] {
		c.Runs = append(c.Runs, cudaipc.Run{
			Region: cudaipc.RegionID(binary.LittleEndian.Uint32(raw)), RegionOff: binary.LittleEndian.Uint64(raw[4:]),
			ArenaOff: int64(binary.LittleEndian.Uint64(raw[12:])), Len: binary.LittleEndian.Uint32(raw[20:]),
		})
	}
	return f.end("copy")
}

// putDone puts the end of a copy.
func putDone(b []byte, t cudaipc.Ticket, d *cudaipc.Done) []byte {
	b = putError(putHead(b, msgDone, uint64(t)), d.Err)
	b = put32(b, uint32(len(d.Sums)))
	for _, sum := range d.Sums {
		b = put32(b, sum)
	}
	b = put32(b, uint32(len(d.Bad)))
	for _, bad := range d.Bad {
		b = put8(b, bad)
	}
	return put64(b, uint64(d.SumTime))
}

func takeDone(f *fields) (d cudaipc.Done, err error) {
	d.Err = f.error()
	if n := f.count(4); n > 0 {
		d.Sums = make([]uint32, n)
		for i := range d.Sums {
			d.Sums[i] = f.u32()
		}
	}
	if n := f.count(1); n > 0 {
		d.Bad = make([]bool, n)
		for i := range d.Bad {
			d.Bad[i] = f.flag()
		}
	}
	d.SumTime = time.Duration(f.u64())
	return d, f.end("done")
}

const (
	wireWait  = 20
	wireState = 9
)

func putPoll(b []byte, number uint64, waits []cudaipc.Wait) []byte {
	b = put32(putHead(b, msgPoll, number), uint32(len(waits)))
	for i := range waits {
		b = put32(put32(put32(b, uint32(waits[i].Peer)), waits[i].Event), waits[i].Revoke)
		b = put64(b, waits[i].Step)
	}
	return b
}

func takePoll(f *fields) ([]cudaipc.Wait, error) {
	waits := make([]cudaipc.Wait, f.count(wireWait))
	for i := range waits {
		waits[i] = cudaipc.Wait{Peer: cudaipc.PeerID(f.u32()), Event: f.u32(), Revoke: f.u32(), Step: f.u64()}
	}
	return waits, f.end("poll")
}

func putStates(b []byte, number uint64, states []cudaipc.State, err error) []byte {
	b = putError(putHead(b, msgStates, number), err)
	b = put32(b, uint32(len(states)))
	for i := range states {
		b = put64(b, states[i].Step)
		flags := byte(0)
		if states[i].Fired {
			flags |= 1
		}
		if states[i].Revoked {
			flags |= 2
		}
		b = append(b, flags)
	}
	return b
}

func takeStates(f *fields, states []cudaipc.State) error {
	err := f.error()
	if n := f.count(wireState); n != len(states) {
		f.bad = true
	}
	for i := range states {
		states[i].Step = f.u64()
		flags := f.u8()
		f.bad = f.bad || flags > 3
		states[i].Fired, states[i].Revoked = flags&1 != 0, flags&2 != 0
	}
	if bad := f.end("states"); bad != nil {
		return bad
	}
	return err
}

// Bytes of the elements of a sample.
const (
	wirePiece       = 24
	wireSampleBlock = 8
)

// putSample puts a sample. Its number is the ticket.
func putSample(b []byte, t cudaipc.Ticket, s *cudaipc.Sample) []byte {
	b = putHead(b, msgSum, uint64(t))
	b = put64(put32(b, uint32(s.Peer)), uint64(s.Within))
	b = put32(b, uint32(len(s.Pieces)))
	for i := range s.Pieces {
		p := &s.Pieces[i]
		b = put64(put32(b, uint32(p.Region)), p.Offset)
		b = put32(put64(b, p.Stride), p.Bytes)
	}
	b = put32(b, uint32(len(s.Blocks)))
	for i := range s.Blocks {
		b = put32(put32(b, s.Blocks[i].Block), s.Blocks[i].Seed)
	}
	return b
}

func takeSample(f *fields) (*cudaipc.Sample, error) {
	s := &cudaipc.Sample{Peer: cudaipc.PeerID(f.u32()), Within: time.Duration(f.u64())}
	s.Pieces = make([]cudaipc.Piece, f.count(wirePiece))
	for i := range s.Pieces {
		s.Pieces[i] = cudaipc.Piece{Region: cudaipc.RegionID(f.u32()), Offset: f.u64(), Stride: f.u64(), Bytes: f.u32()}
	}
	s.Blocks = make([]cudaipc.SampleBlock, f.count(wireSampleBlock))
	for i := range s.Blocks {
		s.Blocks[i] = cudaipc.SampleBlock{Block: f.u32(), Seed: f.u32()}
	}
	return s, f.end("sample")
}
